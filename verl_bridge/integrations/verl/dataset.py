"""verl's dataset without the questions that alias matching cannot ground."""

from __future__ import annotations

import logging
from typing import Any

from omegaconf import DictConfig
from verl.utils.dataset.rl_dataset import RLHFDataset

from verl_bridge.qa.answers import is_yes_no
from verl_bridge.qa.questions import training_golds

logger = logging.getLogger(__name__)


class WithoutYesNo(RLHFDataset):
    """``verl_bridge.gca.yes_no=drop``: questions with a yes/no gold leave the training data [ours].

    Validation data keep theirs, unless they are the training files: what is measured stays what it was.

    Raises:
        ValueError: no question is left, or a row has no gold answers.
    """

    def __init__(self, data_files: Any, *args: Any, config: DictConfig, **kwargs: Any) -> None:
        # verl does not say which of the two it makes
        self._train = _names(data_files) == _names(config.train_files)
        super().__init__(data_files, *args, config=config, **kwargs)

    def maybe_filter_out_long_prompts(self, dataframe: Any = None) -> Any:
        if self._train:
            kept = [
                number
                for number, row in enumerate(dataframe)
                if not is_yes_no(training_golds(row, f"data.train_files: row {number + 1}"))
            ]
            left_out = len(dataframe) - len(kept)
            logger.warning("yes_no=drop: %d of %d training questions left out", left_out, len(dataframe))
            if not kept:
                raise ValueError("verl_bridge.gca.yes_no=drop leaves no training question: use yes_no: gate")
            dataframe = dataframe.select(kept)
        return super().maybe_filter_out_long_prompts(dataframe)


def _names(files: Any) -> list[str]:
    return [files] if isinstance(files, str) else list(files)
