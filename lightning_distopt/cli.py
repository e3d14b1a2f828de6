"""Lightning's command line, with errors that list what is valid."""

import inspect
import re
import sys
from typing import Any, NoReturn

from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import StrategyRegistry

from lightning_distopt import algorithms
from lightning_distopt.algorithms import did_you_mean
from lightning_distopt.strategies import PYTORCH_LIGHTNING

__all__ = ["ArgumentParser", "DistOptCLI", "main"]


class ArgumentParser(LightningArgumentParser):
    """Lightning's parser. Where a class of this package was given an unknown option, it names the known ones."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print usage and ``message``, and exit with code 2."""
        super().error(message + _valid(message), ex)


class DistOptCLI(LightningCLI):
    """A LightningCLI in whose configuration a wrong strategy is refused with the valid ones listed.

    Plain LightningCLI takes this package's strategies too; of a wrong name it says only that it is wrong.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Parse and run.

        Args:
            *args: as LightningCLI.
            **kwargs: as LightningCLI.
        """
        kwargs.setdefault("parser_class", ArgumentParser)
        super().__init__(*args, **kwargs)

    def before_instantiate_classes(self) -> None:
        """Refuse an unknown strategy name."""
        config = self.config if self.subcommand is None else self.config[self.subcommand]
        name, known = config["trainer"]["strategy"], StrategyRegistry.available_strategies()
        if isinstance(name, str) and name.lower() not in ("auto", *known):
            # Lightning would not say which names there are.
            self.parser.error(f"unknown strategy {name!r}{did_you_mean(name, ['auto', *sorted(known)])}")


def main() -> None:
    """Run any LightningModule and LightningDataModule by their import paths, as ``python -m lightning_distopt``."""
    DistOptCLI()


def _valid(message: str) -> str:
    """Return what to add to jsonargparse's message about a class or an option: a sentence, or nothing."""
    if "pytorch_lightning" in sys.modules and "does not correspond to a subclass of" in message:
        return f"\n{PYTORCH_LIGHTNING}"
    refused = re.findall(r"class_path '(?:\w+\.)*(\w+)':\s+Option '(\w+)' is not accepted", message)
    if refused:
        name, option = refused[-1]  # the innermost
        if name in ("DistOptStrategy", "DistOptBaguaStrategy", "DistOptDDPStrategy"):
            return (
                "\nOptions of an algorithm go into `options` of lightning_distopt.DistOptBaguaStrategy; those of "
                "lightning_distopt.DistOptDDPStrategy into `dict_kwargs`, beside `init_args`."
            )
        cls = getattr(algorithms, name, None)
        if cls is not None:
            valid = list(inspect.signature(cls).parameters)
            return f"\nunknown option {option!r} of {name}{did_you_mean(option, valid)}"
    missing = re.findall(r"module 'lightning_distopt\.algorithms' has no attribute '(\w+)'", message)
    if missing:
        valid = [cls.__name__ for cls in algorithms.ALGORITHMS.values()]
        return f"\nunknown algorithm {missing[-1]!r}{did_you_mean(missing[-1], valid)}"
    return ""
