import pytest
from datasets import Dataset
from omegaconf import OmegaConf

from verl_bridge.integrations.verl.dataset import WithoutYesNo

GOLDS = (["Lima"], ["yes"], ["No."], ["no", "nope"], ["north"], ["Yes, it is"])


@pytest.fixture
def files(tmp_path):
    made = {}
    for name, golds in (("train", GOLDS), ("val", GOLDS), ("verdicts", (["yes"], ["no"]))):
        rows = [
            {
                "data_source": "d",
                "prompt": [{"role": "user", "content": f"question {i}"}],
                "reward_model": {"style": "rule", "ground_truth": {"target": gold}},
                "extra_info": {"index": i},
                "golden_answers": ["yes", "Lima", ""][i % 3],  # a column of Search-R1's that training never reads
            }
            for i, gold in enumerate(golds)
        ]
        made[name] = str(tmp_path / f"{name}.parquet")
        Dataset.from_list(rows).to_parquet(made[name])
    return made


def read(files, which, train):
    config = OmegaConf.create({"train_files": train, "filter_overlong_prompts": False, "cache_dir": "/nowhere"})
    return WithoutYesNo(data_files=which, tokenizer=None, processor=None, config=config)


def test_training_questions_with_a_verdict_are_left_out_and_validation_keeps_its_own(files):
    train = read(files, files["train"], files["train"])
    kept = [row["reward_model"]["ground_truth"]["target"] for row in train.dataframe]
    assert kept == [["Lima"], ["north"], ["Yes, it is"]]  # only bare verdicts are verdicts
    assert len(read(files, [files["val"]], files["train"])) == len(GOLDS)
    both = [files["train"], files["verdicts"]]
    assert len(read(files, both, both)) == 3


def test_no_question_left_is_refused(files):
    with pytest.raises(ValueError, match="yes_no=drop leaves no training question"):
        read(files, files["verdicts"], files["verdicts"])
