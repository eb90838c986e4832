"""Personal data out of conversations, with placeholders such as <EMAIL_ADDRESS> in its place.

Microsoft Presidio finds it (https://microsoft.github.io/presidio): by patterns, with their checksums and with the words
before them ("ssn", "passport"), which needs no model; names of people and places by a spaCy model, where one is given. What
tells nobody who somebody is stays: dates, links, UUIDs, organisations, nationalities, addresses in private networks. So do
roles, ids, and the form of a call of a tool.
"""

from __future__ import annotations

import ipaddress
import json
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import spacy
from presidio_analyzer import AnalyzerEngine, EntityRecognizer, RecognizerRegistry, RecognizerResult
from presidio_analyzer.context_aware_enhancers import LemmaContextAwareEnhancer
from presidio_analyzer.nlp_engine import NerModelConfiguration, SpacyNlpEngine
from presidio_analyzer.predefined_recognizers import (
    CreditCardRecognizer,
    CryptoRecognizer,
    EmailRecognizer,
    IbanRecognizer,
    IpRecognizer,
    MacAddressRecognizer,
    MedicalLicenseRecognizer,
    NhsRecognizer,
    PhoneRecognizer,
    SpacyRecognizer,
    UsBankRecognizer,
    UsItinRecognizer,
    UsLicenseRecognizer,
    UsPassportRecognizer,
    UsSsnRecognizer,
)
from spacy.tokens import Doc
from tldextract import TLDExtract

from selfspec.traffic.conversations import Conversation, Message

LANGUAGE = "en"
# What spaCy's models, of English and of other languages, call people and places.
NAME_LABELS = {"PERSON", "PER", "GPE", "LOC"}
# The score of a telephone number, and of a weak pattern (nine digits) after a word that speaks for it.
THRESHOLD = 0.4
# Of phonenumbers' leniencies, the least that does not take a date between two numbers for a telephone number.
STRICT_GROUPING = 2
# Years are numbers of pagers in Germany.
MIN_PHONE_DIGITS = 7
# The addresses of IPv6 that are given to anyone. `x[1::2]` and the `a::b` of C++ are addresses too, but not among them.
PUBLIC_IPV6 = ipaddress.IPv6Network("2000::/3")


class Redactor:
    """Replaces personal data in conversations, and counts by its kind what it replaced.

    Args:
        model: name or folder of an installed spaCy model that finds names; None for patterns alone.

    Raises:
        ValueError: there is no such model.
    """

    def __init__(self, model: str | None = None) -> None:
        self.counts: Counter[str] = Counter()
        self._analyzer = AnalyzerEngine(
            registry=RecognizerRegistry(_recognizers(), supported_languages=[LANGUAGE]),
            nlp_engine=_Pipeline(model),
            default_score_threshold=THRESHOLD,
            # By default the "lic" before a licence's number is found in "click".
            context_aware_enhancer=LemmaContextAwareEnhancer(context_matching_mode="whole_word"),
        )

    def __call__(self, conversation: Conversation) -> Conversation:
        return replace(conversation, messages=[self._message(message) for message in conversation.messages])

    def text(self, text: str) -> str:
        """The text with a placeholder for each piece of personal data; where two overlap, one for both."""
        found = self._analyzer.analyze(text, LANGUAGE)
        pieces, end = [], 0
        # Of those that begin together the surest gives the name.
        for entity in sorted(found, key=lambda e: (e.start, -e.score, e.entity_type)):
            if entity.start >= end:
                pieces += [text[end : entity.start], f"<{entity.entity_type}>"]
                self.counts[entity.entity_type] += 1
            end = max(end, entity.end)
        return "".join([*pieces, text[end:]])

    def _message(self, message: Message) -> Message:
        redacted = {**message, "content": self.text(message["content"])}
        if "tool_calls" in message:
            redacted["tool_calls"] = self._calls(message["tool_calls"])
        return redacted

    def _calls(self, value: Any) -> Any:
        """Calls of tools, with nothing but their arguments changed."""
        if isinstance(value, list):
            return [self._calls(item) for item in value]
        if isinstance(value, dict):
            return {key: (self._arguments if key == "arguments" else self._calls)(item) for key, item in value.items()}
        return value

    def _arguments(self, value: Any) -> Any:
        """A call's arguments, as an object or as JSON in a string: what was valid JSON still is."""
        try:
            parsed = json.loads(value)
        except (TypeError, ValueError):
            return self._leaves(value)
        redacted = self._leaves(parsed)
        return value if redacted == parsed else json.dumps(redacted, ensure_ascii=False)

    def _leaves(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._leaves(item) for item in value]
        if isinstance(value, dict):
            return {key: self._leaves(item) for key, item in value.items()}
        redacted = self.text(str(value))
        return value if redacted == str(value) else redacted


def _recognizers() -> list[EntityRecognizer]:
    """All that Presidio has on for English, but dates, links and UUIDs."""
    return [
        _Email(),
        _Phone(leniency=STRICT_GROUPING),
        _PublicIp(),
        MacAddressRecognizer(),
        CreditCardRecognizer(),
        CryptoRecognizer(),
        IbanRecognizer(),
        MedicalLicenseRecognizer(),
        NhsRecognizer(),
        UsBankRecognizer(),
        UsItinRecognizer(),
        UsLicenseRecognizer(),
        UsPassportRecognizer(),
        UsSsnRecognizer(),
        SpacyRecognizer(supported_entities=["PERSON", "LOCATION"]),
    ]


class _Email(EmailRecognizer):
    """Presidio's fetches the list of domains from the network, and misses addresses in the query of a link."""

    extract = TLDExtract(suffix_list_urls=(), cache_dir=None)

    def validate_result(self, pattern_text: str) -> bool:
        return bool(self.extract(pattern_text.rpartition("@")[2]).fqdn)


class _Phone(PhoneRecognizer):
    """Presidio's takes numbers of any length."""

    def analyze(self, text: str, *args: Any, **kwargs: Any) -> list[RecognizerResult]:
        found = super().analyze(text, *args, **kwargs)
        return [entity for entity in found if sum(map(str.isdigit, text[entity.start : entity.end])) >= MIN_PHONE_DIGITS]


class _PublicIp(IpRecognizer):
    """Presidio's takes addresses that are nobody's in particular, too."""

    def invalidate_result(self, pattern_text: str) -> bool:
        try:
            address = ipaddress.ip_interface(pattern_text).ip
        except ValueError:
            return True
        address = getattr(address, "ipv4_mapped", None) or address
        return not (address.is_global and (address.version == 4 or address in PUBLIC_IPV6))


class _Pipeline(SpacyNlpEngine):
    """Words for Presidio's context, and names where there is a model."""

    nlp: Any

    def __init__(self, model: str | None) -> None:
        try:
            # Taggers and parsers take most of the time and find nothing.
            nlp = spacy.blank(LANGUAGE) if model is None else spacy.load(model, exclude=["tagger", "parser", "lemmatizer"])
        except OSError as error:
            raise ValueError(
                f"{model} is no installed spaCy model: run `python -m spacy download {model}`, or redact without names"
            ) from error
        tokenize = nlp.tokenizer

        def tokenize_with_lemmas(text: str) -> Doc:
            # Presidio compares lemmas with its context words, and there is no lemmatizer.
            doc = tokenize(text)
            for token in doc:
                token.lemma_ = token.lower_
            return doc

        nlp.tokenizer = tokenize_with_lemmas
        # The limit is there for parsers.
        nlp.max_length = sys.maxsize
        labels = {label for pipe_labels in nlp.pipe_labels.values() for label in pipe_labels}
        # Presidio warns at every entity whose label it does not know, unless it is told to ignore it.
        super().__init__(ner_model_configuration=NerModelConfiguration(labels_to_ignore=labels - NAME_LABELS))
        self.nlp = {LANGUAGE: nlp}
