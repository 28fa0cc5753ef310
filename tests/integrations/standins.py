"""Stand-ins for what a run's retriever is made of; nothing real is started."""

from types import SimpleNamespace

from verl_bridge.config.schema import VerlBridgeConfig

FILES = {"corpus": "c", "index": "i", "encoder": "e"}


def settings(**retriever):
    return VerlBridgeConfig.from_mapping({"retriever": {**FILES, "deadline": 2.0, **retriever}}).retriever


def answer(query, version, shift=0.0, ids=("a", "b"), golds="Lima"):
    documents = [{"id": i, "title": f"title {i}", "text": f"{golds if i == 'b' else ''} {query}"} for i in ids]
    found = {"status": "ok", "error": None, "ids": list(ids), "documents": documents, "adapter_version": version}
    return {**found, "scores": [0.5 + shift - n / 10 for n in range(len(ids))]}


class Actor:
    """A started actor: knows what it was asked; what it learns is told by its version."""

    def __init__(self):
        self.version, self.asked, self.waited, self.fails = 0, [], 0, None

    def wait(self):
        self.waited += 1

    def call(self, method, *arguments):
        self.asked.append((method, *arguments))
        if self.fails:
            raise self.fails
        return getattr(self, f"_{method}")(*arguments)

    def _version(self):
        return self.version

    def _adapter_bytes(self):
        return self.version, b"adapter %d" % self.version

    def _scores(self, queries, ids):
        return [[{"a": 0.5, "b": 0.4}[i] for i in row] for row in ids]

    def _update(self, batch, name):
        self.version += 1
        return {"version": self.version, "metrics": {"bridge/loss": 0.5}}

    def _publish(self, adapter, version, replace):
        self.version = version

    def _known_versions(self):
        return [self.version, self.version - 1]

    def _documents(self, ids):
        return [{"id": i} for i in ids]

    def _load(self, directory):
        self.version = 7

    def _save(self, directory):
        pass

    _save_adapter = _save


class Found:
    """Ray's handle of an actor as rollouts find it."""

    def __init__(self):
        self.searched = []
        self.search = SimpleNamespace(remote=self._search)

    async def _search(self, queries, top_k):
        self.searched.append((list(queries), top_k))
        return [answer(query, 0) for query in queries]


class Serving:
    """Ray Serve's side."""

    def __init__(self, refuses=None):
        self.published, self.stopped, self.refuses = [], 0, refuses

    async def search(self, queries, top_k):
        return [answer(query, 0) for query in queries]

    def publish(self, adapter, version, timeout):
        if self.refuses:
            raise self.refuses
        self.published.append((adapter, version, timeout))

    def stop(self):
        self.stopped += 1


def opened(given):
    """The keywords with which a retriever is opened, without those about the actor."""
    actor = ("updater", "searchable", "timeout", "deadline", "restarts", "wait", "num_gpus", "num_cpus", "device")
    return {key: value for key, value in given.items() if key not in (*actor, "replicas", "shards")}
