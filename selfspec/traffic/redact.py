"""Replaces personal data in conversations by placeholders such as <EMAIL_ADDRESS>.

Microsoft Presidio (https://microsoft.github.io/presidio) finds most of it without a model, by patterns, their checksums and
the words before them ("ssn", "passport"). If a spaCy model is given, it finds the names of people and places. Data that
identifies nobody stays: dates, links, UUIDs, organisations, nationalities, addresses in private networks. Roles, ids and the
form of a tool's call stay, too. An answer whose text is changed loses its token ids, which spell the text as it was.
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

from selfspec.traffic.conversations import Conversation, Message, changed

LANGUAGE = "en"
# Labels of people and places in spaCy's models, of English and of other languages.
NAME_LABELS = {"PERSON", "PER", "GPE", "LOC"}
# The score of a telephone number, and of a weak pattern (nine digits) after a word that supports it.
THRESHOLD = 0.4
# The most lenient of phonenumbers' settings that does not take a date between two numbers for a telephone number.
STRICT_GROUPING = 2
# Shorter numbers are often something else: in Germany, years are valid numbers of pagers.
MIN_PHONE_DIGITS = 7
# The IPv6 addresses that are assigned to anyone. `x[1::2]` and the `a::b` of C++ are addresses too, but outside this range.
PUBLIC_IPV6 = ipaddress.IPv6Network("2000::/3")

# What names a tool's call.
CALL_NAMES = ("id", "type", "name", "index")


class Redactor:
    """Replaces personal data in conversations, and counts the replacements of each kind.

    Args:
        model: name or folder of an installed spaCy model that finds names; None uses patterns alone.

    Raises:
        ValueError: there is no such model.
    """

    def __init__(self, model: str | None = None) -> None:
        self.counts: Counter[str] = Counter()
        self._analyzer = AnalyzerEngine(
            registry=RecognizerRegistry(_recognizers(), supported_languages=[LANGUAGE]),
            nlp_engine=_Pipeline(model),
            default_score_threshold=THRESHOLD,
            # By default "click" counts as the "lic" that may precede a licence's number.
            context_aware_enhancer=LemmaContextAwareEnhancer(context_matching_mode="whole_word"),
        )

    def __call__(self, conversation: Conversation) -> Conversation:
        return replace(
            conversation,
            messages=[self._message(message) for message in conversation.messages],
            tools=self._leaves(conversation.tools),
            chat_template_kwargs=self._leaves(conversation.chat_template_kwargs),
        )

    def text(self, text: str) -> str:
        """The text with a placeholder for each piece of personal data. Two pieces that overlap get one placeholder."""
        found = self._analyzer.analyze(text, LANGUAGE)
        pieces, end = [], 0
        # Of pieces that begin together, the most certain one names the placeholder.
        for entity in sorted(found, key=lambda e: (e.start, -e.score, e.entity_type)):
            if entity.start >= end:
                pieces += [text[end : entity.start], f"<{entity.entity_type}>"]
                self.counts[entity.entity_type] += 1
            end = max(end, entity.end)
        return "".join([*pieces, text[end:]])

    def _message(self, message: Message) -> Message:
        redacted: dict[str, Any] = {
            key: self.text(message[key]) for key in ("content", "reasoning_content") if key in message
        }
        if "tool_calls" in message:
            redacted["tool_calls"] = self._calls(message["tool_calls"])
        return changed(message, **redacted)

    def _calls(self, value: Any) -> Any:
        """A tool's calls. What names the call stays."""
        if isinstance(value, list):
            return [self._calls(item) for item in value]
        if not isinstance(value, dict):
            return self._leaves(value)
        parts = {"arguments": self._arguments, "function": self._calls, **dict.fromkeys(CALL_NAMES, lambda name: name)}
        return {key: parts.get(key, self._leaves)(item) for key, item in value.items()}

    def _arguments(self, value: Any) -> Any:
        """A call's arguments, an object or a string of JSON. Valid JSON stays valid."""
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
            return {self.text(key): self._leaves(item) for key, item in value.items()}
        redacted = self.text(str(value))
        return value if redacted == str(value) else redacted


def _recognizers() -> list[EntityRecognizer]:
    """All recognizers that Presidio enables for English, except those for dates, links and UUIDs."""
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
    """Presidio's own downloads the list of domains, and misses addresses in a link's query."""

    extract = TLDExtract(suffix_list_urls=(), cache_dir=None)

    def validate_result(self, pattern_text: str) -> bool:
        return bool(self.extract(pattern_text.rpartition("@")[2]).fqdn)


class _Phone(PhoneRecognizer):
    """Presidio's own accepts numbers of any length."""

    def analyze(self, text: str, *args: Any, **kwargs: Any) -> list[RecognizerResult]:
        found = super().analyze(text, *args, **kwargs)
        return [entity for entity in found if sum(map(str.isdigit, text[entity.start : entity.end])) >= MIN_PHONE_DIGITS]


class _PublicIp(IpRecognizer):
    """Presidio's own also accepts addresses that belong to nobody in particular."""

    def invalidate_result(self, pattern_text: str) -> bool:
        try:
            address = ipaddress.ip_interface(pattern_text).ip
        except ValueError:
            return True
        address = getattr(address, "ipv4_mapped", None) or address
        return not (address.is_global and (address.version == 4 or address in PUBLIC_IPV6))


class _Pipeline(SpacyNlpEngine):
    """Gives Presidio the words for its context and, if there is a model, the names."""

    nlp: Any

    def __init__(self, model: str | None) -> None:
        try:
            # Taggers and parsers take most of the time and find no names.
            nlp = spacy.blank(LANGUAGE) if model is None else spacy.load(model, exclude=["tagger", "parser", "lemmatizer"])
        except OSError as error:
            raise ValueError(
                f"{model} is no installed spaCy model: run `python -m spacy download {model}`, or redact without names"
            ) from error
        tokenize = nlp.tokenizer

        def tokenize_with_lemmas(text: str) -> Doc:
            # Presidio compares its context words with lemmas, and there is no lemmatizer.
            doc = tokenize(text)
            for token in doc:
                token.lemma_ = token.lower_
            return doc

        nlp.tokenizer = tokenize_with_lemmas
        # The limit exists for parsers.
        nlp.max_length = sys.maxsize
        labels = {label for pipe_labels in nlp.pipe_labels.values() for label in pipe_labels}
        # Otherwise Presidio warns of every entity whose label it does not know.
        super().__init__(ner_model_configuration=NerModelConfiguration(labels_to_ignore=labels - NAME_LABELS))
        self.nlp = {LANGUAGE: nlp}
