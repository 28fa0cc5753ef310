"""Settings: the typed schema (:mod:`verl_bridge.config.schema`) and the Hydra group ``verl_bridge``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verl_bridge.config.schema import VerlBridgeConfig

if TYPE_CHECKING:
    from omegaconf import DictConfig


def load_settings(config: DictConfig) -> VerlBridgeConfig:
    """The checked ``verl_bridge`` section of a composed verl config; the defaults where it has none.

    Raises:
        ConfigError: see :class:`~verl_bridge.config.schema.VerlBridgeConfig`.
    """
    from omegaconf import OmegaConf

    section: Any = config.get("verl_bridge")
    return VerlBridgeConfig.from_mapping(
        OmegaConf.to_container(section, resolve=True) if OmegaConf.is_config(section) else section
    )


__all__ = ["VerlBridgeConfig", "load_settings"]
