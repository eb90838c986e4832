"""Dataclass fields as command-line options: a setting has one name, one default, one help text and one check everywhere.

A command names the dataclasses it wants, and receives instances of them:

    @command(app, target=TargetOptions, sampling=SamplingParams)
    def generate(target: TargetOptions, sampling: SamplingParams, ...) -> None: ...

Every command gets `--debug` too, and turns the errors a user can cause into one line and an exit code.
"""

import dataclasses
import inspect
import logging
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any

import typer

from selfspec.failures import reported_failures

# Options that are not named after their fields.
FLAGS = {"stop_token_ids": "--stop-id", "skip_special_tokens": "--skip-special-tokens/--no-skip-special-tokens"}


def command(app: typer.Typer, **groups: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as a command. An argument named in `groups` becomes one option for each field of its dataclass."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        parameters = []
        for parameter in inspect.signature(function, eval_str=True).parameters.values():
            parameters += _field_options(groups[parameter.name]) if parameter.name in groups else [parameter]
        debug = typer.Option("--debug", help="show the full traceback of an error")
        parameters.append(_option("debug", Annotated[bool, debug], False))

        def run(*, debug: bool, **values: Any) -> None:
            # transformers imports torchao if it is installed, and torchao then logs kernels of other devices.
            for library in ("torchao", "torch.utils._pytree"):
                logging.getLogger(library).setLevel(logging.ERROR)
            with reported_failures(debug):
                for name, group in groups.items():
                    values[name] = group(**{option.name: values.pop(option.name) for option in _field_options(group)})
                function(**values)

        run.__name__, run.__doc__, run.__annotations__ = function.__name__, function.__doc__, {}
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return app.command()(run)

    return register


def _option(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _field_options(group: type) -> list[inspect.Parameter]:
    """One parameter for each field that has a default; mappings have none, and are for Python callers only."""
    hints = typing.get_type_hints(group)
    options = []
    for setting in dataclasses.fields(group):
        hint, default = hints[setting.name], setting.default
        if default is dataclasses.MISSING:
            continue
        if default == ():
            hint, default = types.GenericAlias(list, typing.get_args(hint)), []
        flag = FLAGS.get(setting.name, "--" + setting.name.replace("_", "-"))
        option = typer.Option(flag, help=setting.metadata["help"])
        options.append(_option(setting.name, Annotated[hint, option], default))
    return options


def quiet_libraries() -> None:
    """Silence the libraries' progress bars and advice, which would break up our own output."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
