"""What of verl and TransferQueue this package uses, read from its own source, and where the installed ones differ.

Every function here returns lines of text, one a difference; an empty list is a host that fits.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HOSTS = ("verl", "transfer_queue")
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def is_host(module: str | None) -> bool:
    return (module or "").split(".")[0] in HOSTS


def resolve(path: str) -> Any:
    """``verl.a.b:Class.method`` → the object. Raises ImportError or AttributeError."""
    module, _, names = path.partition(":")
    found: Any = importlib.import_module(module)
    for name in filter(None, names.split(".")):
        found = inspect.getattr_static(found, name) if inspect.isclass(found) else getattr(found, name)
    return found.__func__ if isinstance(found, (staticmethod, classmethod)) else found


def explain(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


# ---- what we import and call ----------------------------------------------------------------------------------------


def imported_names(tree: ast.AST) -> Iterator[tuple[str, str, str | None]]:
    """(the name here, module, the name there; None for a module) of each import from a host."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and is_host(node.module):
            for alias in node.names:
                yield alias.asname or alias.name, node.module, alias.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if is_host(alias.name):
                    yield alias.asname or alias.name.split(".")[0], alias.name, None


def import_differences(sources: Sequence[Path]) -> list[str]:
    """Names that the host does not have, and calls of imported names that it would refuse."""
    found = []
    for source in sources:
        tree = ast.parse(source.read_text())
        known: dict[str, Any] = {}
        for here, module, name in imported_names(tree):
            try:
                loaded = importlib.import_module(module)
                if name is None:
                    known[here] = loaded
                elif hasattr(loaded, name):
                    known[here] = getattr(loaded, name)
                else:
                    known[here] = importlib.import_module(f"{module}.{name}")
            except ImportError as error:
                found.append(f"{source.name}: from {module} import {name}: {explain(error)}")
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and (target := _called(node.func, known, source, found)) is not None:
                found += _refused(node, target, source)
    return found


def _called(node: ast.expr, known: Mapping[str, Any], source: Path, found: list[str]) -> Callable | None:
    """What ``name(…)`` or ``name.attribute(…)`` calls, if the name came from a host."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in known:
        owner = known[node.value.id]
        if not hasattr(owner, node.attr):
            found.append(f"{source.name}:{node.lineno}: {node.value.id}.{node.attr} is not there any more")
            return None
        return getattr(owner, node.attr)
    return None


def _refused(call: ast.Call, target: Callable, source: Path) -> list[str]:
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):  # a builtin without one
        return []
    unpacked = any(isinstance(argument, ast.Starred) for argument in call.args)
    unpacked |= any(keyword.arg is None for keyword in call.keywords)
    arguments = [None for argument in call.args if not isinstance(argument, ast.Starred)]
    keywords = {keyword.arg: None for keyword in call.keywords if keyword.arg is not None}
    try:
        (signature.bind_partial if unpacked else signature.bind)(*arguments, **keywords)
    except TypeError as error:
        return [f"{source.name}:{call.lineno}: {ast.unparse(call)[:100]}: {error}; it takes {signature}"]
    return []


# ---- what we override -----------------------------------------------------------------------------------------------


def our_classes(package: str) -> list[type]:
    """Every class of ``package`` with a base of the host's, its modules imported."""
    root = importlib.import_module(package)
    for source in sorted(Path(root.__path__[0]).rglob("*.py")):
        for _, module, _ in imported_names(ast.parse(source.read_text())):
            importlib.import_module(module)  # verl's first, as in a run: its import brings in ours
    modules = [importlib.import_module(m.name) for m in pkgutil.walk_packages(root.__path__, f"{package}.")]
    classes = {
        value
        for module in modules
        for value in vars(module).values()
        if inspect.isclass(value) and value.__module__ == module.__name__
    }
    ours = [cls for cls in classes if any(is_host(base.__module__) for base in cls.__mro__)]
    return sorted(ours, key=lambda cls: cls.__qualname__)


def overrides(cls: type) -> Iterator[tuple[str, type, Callable, type, Callable]]:
    """(name, our class, our function, their class, theirs) of each method that hides one of the host's.

    Constructors are left out: ours are called by ours, or checked in the table of calls.
    """
    for position, ours in enumerate(cls.__mro__):
        if is_host(ours.__module__) or ours.__module__ == "builtins":
            continue
        for name, value in vars(ours).items():
            value = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
            if not inspect.isfunction(value) or name == "__init__":
                continue
            for base in cls.__mro__[position + 1 :]:
                theirs = vars(base).get(name)
                theirs = theirs.__func__ if isinstance(theirs, (staticmethod, classmethod)) else theirs
                if is_host(base.__module__) and inspect.isfunction(theirs):
                    yield name, ours, value, base, theirs
                    break


def override_differences(classes: Sequence[type]) -> list[str]:
    """Overridden methods that the host could call in a way ours would not understand."""
    found = []
    for cls in classes:
        for name, ours, function, base, theirs in overrides(cls):
            for reason in not_substitutable(function, theirs):
                found.append(
                    f"{ours.__qualname__}.{name}{inspect.signature(function)} for {base.__module__}.{base.__qualname__}"
                    f".{name}{inspect.signature(theirs)}: {reason}"
                )
    return list(dict.fromkeys(found))


def is_asynchronous(function: Callable) -> bool:
    """An asynchronous generator counts: an abstract method without a body cannot be told from one."""
    plain = inspect.unwrap(function)
    return inspect.iscoroutinefunction(plain) or inspect.isasyncgenfunction(plain)


def not_substitutable(ours: Callable, theirs: Callable) -> list[str]:
    """Why a call that ``theirs`` takes could fail with ``ours``."""
    found = []
    mine, host = (inspect.signature(function).parameters for function in (ours, theirs))
    takes_any_keyword = any(p.kind is p.VAR_KEYWORD for p in mine.values())
    takes_any_position = any(p.kind is p.VAR_POSITIONAL for p in mine.values())
    order = [name for name, p in mine.items() if p.kind in POSITIONAL]
    host_order = [name for name, p in host.items() if p.kind in POSITIONAL]
    if is_asynchronous(ours) != is_asynchronous(theirs):
        found.append("one is a coroutine, the other is not")
    if [p.kind for name, p in host.items() if name not in ("self", "cls")] == [inspect.Parameter.VAR_KEYWORD]:
        return found  # it hands on what another of our methods returned: the names are ours
    for place, name in enumerate(host_order):
        if order[place : place + 1] == [name] or (place >= len(order) and takes_any_position):
            continue
        if name not in mine and takes_any_keyword:
            continue
        found.append(f"no parameter {name!r} at position {place}")
    for name, parameter in host.items():
        if parameter.kind is parameter.KEYWORD_ONLY and name not in mine and not takes_any_keyword:
            found.append(f"no parameter {name!r}")
        if parameter.kind is parameter.VAR_KEYWORD and not takes_any_keyword:
            found.append("no **keywords")
    for name, parameter in mine.items():
        needed = parameter.default is parameter.empty and parameter.kind in (*POSITIONAL, parameter.KEYWORD_ONLY)
        if needed and name not in host:
            found.append(f"the host would not give {name!r}")
    return found


# ---- what the tables say --------------------------------------------------------------------------------------------


def call_differences(calls: Sequence[tuple[str, int, tuple[str, ...]]]) -> list[str]:
    """Calls ``(path, positional arguments, keywords)`` that the host would refuse."""
    found = []
    for path, count, keywords in calls:
        try:
            signature = inspect.signature(resolve(path))
            signature.bind(*[None] * count, **dict.fromkeys(keywords))
        except (ImportError, AttributeError) as error:
            found.append(f"{path}: {explain(error)}")
        except TypeError as error:
            found.append(f"{path}: called with {count} arguments and {', '.join(keywords)}: {error}; takes {signature}")
    return found


def field_differences(fields: Mapping[str, Sequence[str]]) -> list[str]:
    """Attributes or fields that a class of the host lacks."""
    found = []
    for path, names in fields.items():
        try:
            cls = resolve(path)
        except (ImportError, AttributeError) as error:
            found.append(f"{path}: {explain(error)}")
            continue
        annotated = {name for base in cls.__mro__ for name in vars(base).get("__annotations__", {})}
        found += [f"{path} has no {name}" for name in names if name not in annotated and not hasattr(cls, name)]
    return found


def source_differences(mentions: Mapping[str, Sequence[str]]) -> list[str]:
    """Pieces of the host's code that we count on and that are not there any more."""
    found = []
    for path, pieces in mentions.items():
        try:
            source = inspect.getsource(resolve(path))
        except (ImportError, AttributeError) as error:
            found.append(f"{path}: {explain(error)}")
            continue
        found += [f"{path} does not say {piece!r} any more" for piece in pieces if piece not in source]
    return found
