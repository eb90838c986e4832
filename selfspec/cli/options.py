"""Dataclass fields as command-line options: a setting has one name, one default, one help text and one check everywhere.

A command names the dataclasses it wants, and receives instances of them:

    @command(app, target=TargetOptions, sampling=SamplingParams)
    def generate(target: TargetOptions, sampling: SamplingParams, ...) -> None: ...

Every command gets `--debug` too, and turns the errors a user can cause into one line and an exit code. A command that loads
a target and has no argument of its own takes the target as its argument. What can be told of the options without torch is
told before the command runs.
"""

import dataclasses
import inspect
import logging
import types
import typing
from collections.abc import Callable, Collection, Iterable
from typing import Annotated, Any

import typer

from selfspec.cli.help import Command, name_value
from selfspec.cli.importing import show_slow_imports
from selfspec.config import DraftOptions, SamplingParams, TargetOptions
from selfspec.drafters.specs import check_drafter_of
from selfspec.failures import reported_failures
from selfspec.files import check_is_there

# Options that are not named after their fields.
FLAGS = {
    "target": ("--target", "-m"),
    "stop_token_ids": ("--stop-id",),
    "skip_special_tokens": ("--skip-special-tokens/--no-skip-special-tokens",),
}
# What `--help` calls the options of a dataclass; those of others stand among the command's own.
PANELS: dict[type, str] = {TargetOptions: "Target", SamplingParams: "Sampling", DraftOptions: "Drafting"}


def command(
    app: typer.Typer, *, without: Collection[str] = (), **groups: type
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as a command. An argument named in `groups` becomes one option for each field of its dataclass.

    Args:
        without: fields that make no sense in this command, which keep their defaults.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(function, eval_str=True).parameters.values()
        parameters = []
        if TargetOptions in groups.values() and not any(map(_is_argument, own)):
            parameters.append(_option("target_argument", Annotated[str | None, MODEL], None))
        for parameter in own:
            parameters += _field_options(groups[parameter.name], without) if parameter.name in groups else [parameter]
        debug = typer.Option("--debug", help="show the full traceback of an error")
        parameters.append(_option("debug", Annotated[bool, debug], False))
        for parameter in parameters:
            name_value(parameter)

        def run(*, debug: bool, target_argument: str | None = None, **values: Any) -> None:
            # transformers imports torchao if it is installed, and torchao then logs kernels of other devices.
            for library in ("torchao", "torch.utils._pytree"):
                logging.getLogger(library).setLevel(logging.ERROR)
            with reported_failures(debug):
                if target_argument is not None:
                    if values["target"] is not None:
                        raise ValueError(
                            f"{target_argument} and --target {values['target']} both name a target: give one of them"
                        )
                    values["target"] = target_argument
                for name, group in groups.items():
                    fields = [option.name for option in _field_options(group, without)]
                    values[name] = group(**{field: values.pop(field) for field in fields})
                _check_early(values)
                show_slow_imports()
                function(**values)

        run.__name__, run.__doc__, run.__annotations__ = function.__name__, function.__doc__, {}
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return app.command(cls=Command)(run)

    return register


MODEL = typer.Argument(
    metavar="MODEL", help="the target, as with --target: a directory, a Hub id or smollm2", show_default=False
)


def _is_argument(parameter: inspect.Parameter) -> bool:
    parts = getattr(parameter.annotation, "__metadata__", ())
    return any(isinstance(part, typer.models.ArgumentInfo) for part in parts)


def _option(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _field_options(group: type, without: Collection[str]) -> list[inspect.Parameter]:
    """One parameter for each field that has a default; mappings have none, and are for Python callers only."""
    hints = typing.get_type_hints(group)
    options = []
    for setting in dataclasses.fields(group):
        hint, default = hints[setting.name], setting.default
        if default is dataclasses.MISSING or setting.name in without:
            continue
        if default == ():
            hint, default = types.GenericAlias(list, typing.get_args(hint)), []
        flags = FLAGS.get(setting.name, ("--" + setting.name.replace("_", "-"),))
        text = setting.metadata["help"] + ("; may be given several times" if default == [] else "")
        option = typer.Option(*flags, help=text, rich_help_panel=PANELS.get(group))
        options.append(_option(setting.name, Annotated[hint, option], default))
    return options


def _check_early(values: dict[str, Any]) -> None:
    """Refuse targets, adapters and drafters that are misspelt or not there, before anything slow is imported."""
    draft = DraftOptions()
    specs: list[str] = []
    for value in values.values():
        if isinstance(value, TargetOptions):
            for source in (value.target, value.adapter):
                if source is not None:
                    check_is_there(source)
        elif isinstance(value, DraftOptions):
            draft = value
        specs += _specs(getattr(value, "drafter", None))
    for spec in (*specs, *_specs(values.get("drafter")), *_specs(values.get("drafters"), ",")):
        check_drafter_of(draft, spec)


def _specs(given: str | Iterable[str] | None, separator: str | None = None) -> list[str]:
    """The drafters in an option's value: one, several, or several in one text."""
    if not isinstance(given, str):
        return list(given or ())
    return [given] if separator is None else [name.strip() for name in given.split(separator) if name.strip()]


def quiet_libraries() -> None:
    """Silence the libraries' progress bars and advice, which would break up our own output."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
