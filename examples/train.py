"""Train the GPT of train_gpt.py from the command line, with any strategy that a file in ``configs`` describes.

    python examples/train.py fit --config examples/configs/bytegrad.yaml
    python examples/train.py fit --trainer.strategy distopt_diloco --trainer.max_steps 200
    python examples/train.py fit --config examples/configs/bytegrad.yaml --print_config

``validate``, ``test`` and ``predict`` take a checkpoint by ``--ckpt_path``. Every fit saves its configuration beside
its log, in ``examples/out/lightning_logs/version_*/config.yaml``; ``--config`` takes that file again.
"""

from pathlib import Path

from train_gpt import GPT, TopicsData

from lightning_distopt.cli import DistOptCLI

if __name__ == "__main__":
    defaults = {
        "accelerator": "cpu",
        "devices": 2,
        "max_steps": 600,
        "max_epochs": -1,
        "val_check_interval": 100,
        "check_val_every_n_epoch": None,
        "gradient_clip_val": 1.0,
        "default_root_dir": str(Path(__file__).parent / "out"),
    }
    DistOptCLI(GPT, TopicsData, trainer_defaults=defaults, seed_everything_default=0)
