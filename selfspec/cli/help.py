"""How `--help` looks: what an option takes is said by a word that people know, and flags take nothing."""

import inspect
import typing
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

WORDS: dict[type, str] = {bool: "", int: "INT", float: "NUMBER", Path: "PATH", str: "TEXT"}


def name_value(parameter: inspect.Parameter) -> None:
    """Give an option a word for its value, by its type, unless it has one."""
    hint, *parts = typing.get_args(parameter.annotation) or [None]
    for part in parts:
        if isinstance(part, typer.models.OptionInfo) and part.metavar is None:
            part.metavar = _word(hint)


def _word(hint: Any) -> str | None:
    """The word for a type, or for the one type within it: that of a list's items, or of an option that may be left out."""
    words = {_word(each) for each in typing.get_args(hint)} - {None}
    return WORDS.get(hint) if not words else words.pop() if len(words) == 1 else None


def _without_types(params: list[Any]) -> list[Any]:
    """The parameters, as `--help` is to show them: an argument's name says what it is, and `--help` takes nothing."""
    for param in params:
        if param.param_type_name == "argument":
            param.display_type_rich = lambda ctx: None
        elif param.name == "help":
            param.metavar = ""
    return params


class Command(TyperCommand):
    """A command whose help has no names of Python's types."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


class Group(TyperGroup):
    """Commands of one name, likewise."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))
