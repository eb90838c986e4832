"""Dataclass fields as command-line options: each setting keeps one name, one default, one help text and one check.

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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from selfspec.failures import reported_failures
from selfspec.model.default_target import default_target

if TYPE_CHECKING:
    from selfspec.drafters import Drafter
    from selfspec.model.target import Target

# The options not named after their fields.
FLAGS = {"stop_token_ids": "--stop-id"}


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """Which target to load, and how."""

    target: str | None = field(
        default=None, metadata={"help": "directory or Hub id of the target; the one `selfspec fetch` makes by default"}
    )
    revision: str | None = field(default=None, metadata={"help": "branch, tag or commit, for a Hub id"})
    adapter: str | None = field(
        default=None, metadata={"help": "directory or Hub id of a LoRA adapter (PEFT) to merge into the target"}
    )
    dtype: str = field(default="auto", metadata={"help": "float32, bfloat16, float16, auto; int8, fp8, int4: weights alone"})
    device: str = field(default="auto", metadata={"help": "cpu, cuda, cuda:N, or auto"})

    @property
    def source(self) -> str:
        """The directory or id to load from."""
        return self.target or str(default_target())

    def load(self, *, use_packing: bool = True) -> "Target":
        from selfspec.model.target import Target

        return Target.from_pretrained(
            self.source,
            dtype=self.dtype,
            device=self.device,
            revision=self.revision,
            adapter=self.adapter,
            use_packing=use_packing,
        )


@dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """How to load the drafters a command names, and when to draft."""

    num_draft_tokens: int | None = field(
        default=None, metadata={"help": "most tokens to draft in a step; each drafter has its default"}
    )
    num_nodes: int | None = field(
        default=None, metadata={"help": "most nodes of a candidate tree, root included; each drafter has its default"}
    )
    width: int | None = field(
        default=None,
        metadata={"help": "nodes of a tree expanded at each depth; 1 drafts a chain; each drafter has its default"},
    )
    draft_dtype: str | None = field(default=None, metadata={"help": "of a draft model, as --dtype; the target's by default"})
    sampled_draft: bool = field(
        default=False,
        metadata={"help": "draft models draw their drafts: the target's law, but not plain sampling's very tokens"},
    )
    no_cost_guard: bool = field(
        default=False, metadata={"help": "always draft, even where that is measured to be slower than not to"}
    )

    def load(self, spec: str, target: "Target") -> "Drafter | None":
        from selfspec.drafters import load_drafter

        # One command may name several drafters: each takes the settings that mean something to it.
        has_weights = spec.startswith("draft_model")
        return load_drafter(
            spec,
            target,
            num_draft_tokens=self.num_draft_tokens,
            num_nodes=self.num_nodes,
            width=self.width,
            dtype=self.draft_dtype if has_weights else None,
            is_sampled=self.sampled_draft and (has_weights or spec.startswith("truncated")),
        )


def command(app: typer.Typer, **groups: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as a command. Each argument named in `groups` becomes one option for each field."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        parameters = []
        for parameter in inspect.signature(function, eval_str=True).parameters.values():
            parameters += _field_options(groups[parameter.name]) if parameter.name in groups else [parameter]
        debug = typer.Option("--debug", help="show the full traceback of an error")
        parameters.append(_option("debug", Annotated[bool, debug], False))

        def run(*, debug: bool, **values: Any) -> None:
            # transformers imports torchao where it is installed, which tells of kernels for other devices as it comes in.
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
