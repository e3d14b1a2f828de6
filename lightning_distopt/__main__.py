"""``python -m lightning_distopt fit --model my_package.MyModel --data my_package.MyData --trainer.strategy ...``."""

from lightning_distopt.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
