"""Settings: the typed schema (:mod:`verl_bridge.config.schema`) and the Hydra group ``verl_bridge``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from verl_bridge.config.schema import GCA_ESTIMATOR, VerlBridgeConfig

if TYPE_CHECKING:
    from omegaconf import DictConfig


def load_settings(config: DictConfig) -> VerlBridgeConfig:
    """The checked ``verl_bridge`` section of a composed verl config; the defaults where it has none.

    ``algorithm.adv_estimator=gca`` switches GCA on as ``verl_bridge.gca.enable=true`` does.

    Raises:
        ConfigError: see :class:`~verl_bridge.config.schema.VerlBridgeConfig`.
    """
    from omegaconf import OmegaConf

    section: Any = config.get("verl_bridge")
    settings = VerlBridgeConfig.from_mapping(
        OmegaConf.to_container(section, resolve=True) if OmegaConf.is_config(section) else section
    )
    if OmegaConf.select(config, "algorithm.adv_estimator") == GCA_ESTIMATOR:
        settings = replace(settings, gca=replace(settings.gca, enable=True))
    return settings


__all__ = ["VerlBridgeConfig", "load_settings"]
