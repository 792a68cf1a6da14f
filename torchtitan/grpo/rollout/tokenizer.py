# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Converts prompts to token IDs and completions to text, without torch."""

import codecs
import copy
import functools
import itertools
import json
import operator
import re
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from torchtitan.grpo.rollout.chat_template import PLAIN, WRITTEN, ChatTemplate, marked_plain
from torchtitan.grpo.weight_wire.model_folder import about_pointer

# Placeholder for the assistant's turn when a reply is rendered. Templates keep letters as is.
_TURN = "THETURNOFTHEASSISTANT"
# DeepSeek's tokenizer does not say that its marks of turns are special.
_MARK = re.compile(r"<[|\uff5c].+[|\uff5c]>")
# Whether transformers 4 puts a beginning of sequence before texts, whatever tokenizer.json says, if
# add_bos_token does not say it; transformers 5 reads tokenizer.json.
_BEGINS = {"Llama": True, "CodeLlama": True, "Gemma": True, "Cohere": True, "GPTNeoX": False}
_PIECE_CHARS, _MOST_UNREAD = 2**15, 100
# How tokenizers spell bytes: those with byte fallback as a number, byte-level ones as a letter, which is
# that of the same number if it is visible.
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_LETTERS = sorted(ByteLevel.alphabet())
_BYTES = sorted(range(256), key=lambda byte: chr(byte) not in _LETTERS)
_BYTE_OF = dict(zip(_LETTERS, _BYTES, strict=True))


class TextTooLong(ValueError):
    def __init__(self, most_tokens: int, found: str) -> None:
        super().__init__(
            f"This model's maximum context length is {most_tokens} tokens (training.seq_len), and the "
            f"request has {found}."
        )


class TextCodec:
    """Encodes prompts and decodes completions with the tokenizer of ``hf_assets_path``.

    ``eos_token_ids`` are removed from the end of a completion before decoding. ``prompt_end`` is
    the last token of chat prompts if it is one of ``eos_token_ids``, and empty if it is not.
    ``special_tokens`` is ``prompts.special_tokens``. ``unread`` collects pieces of text that the
    tokenizer could encode only as its unknown token.
    """

    def __init__(
        self,
        hf_assets_path: str,
        eos_token_ids: Sequence[int],
        chat_template_kwargs: Mapping[str, Any] | None = None,
        date: str = "",
        *,
        special_tokens: bool = False,
    ) -> None:
        self._path, self._reads_special = Path(hf_assets_path), special_tokens
        self._chat_kwargs = dict(chat_template_kwargs or {})
        self._eos = frozenset(eos_token_ids)
        self._date = date
        self.prompt_end: str | None = None
        self.unread = set[str]()
        self._most_tokens: int | None = None
        self._pieces = dict[int, tuple[bytes, bool]]()
        file = self._path / "tokenizer.json"
        if not file.is_file():
            raise ValueError(
                f"model.hf_assets_path must contain a tokenizer.json, but {file} does not exist. "
                "Set it to a Hugging Face directory with a fast tokenizer."
            )
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            hint = about_pointer(file)
            raise ValueError(f"{file} is not a readable tokenizer: {error}.{hint}") from error
        # A saved tokenizer may contain truncation and padding settings of its training run.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def bounded(self, most_tokens: int) -> "TextCodec":
        """Returns a codec that raises TextTooLong for texts that certainly have more tokens."""
        codec = copy.copy(self)
        codec._most_tokens = most_tokens
        return codec

    @functools.cached_property
    def longest_token(self) -> int:
        return max(map(len, self.vocabulary()), default=1)

    def encode(self, text: str) -> list[int]:
        """Returns the token IDs of a plain prompt, including a beginning-of-sequence token if any.

        Special tokens that the tokenizer puts before a text are kept, unless the text already begins
        with them. Those that it puts after a text are left out, so that a completion can follow.
        """
        (before, _), own = self._around, self.encode_continuation(text)
        return own if own[: len(before)] == before else before + own

    @functools.cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """The special tokens that the tokenizer puts before each text, and those that it puts after."""
        # A spelling of the vocabulary, because any other text may have no token.
        encoding = self._tokenizer.encode(max(self.vocabulary(), key=len, default=""))
        ids, is_added = encoding.ids, encoding.special_tokens_mask
        before, after = [], []
        if 0 in is_added:
            before = ids[: is_added.index(0)]
            after = ids[len(ids) - is_added[::-1].index(0) :]
        kind = str(self.settings.get("tokenizer_class")).removesuffix("Fast")
        begins = _BEGINS.get(kind.removesuffix("Tokenizer"))
        bos = self._tokenizer.token_to_id(self.special_text("bos_token") or "")
        if begins is not None and bos is not None:
            before = [bos] if self.settings.get("add_bos_token", begins) else []
        return before, after

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        """The content of tokenizer_config.json."""
        file = self._path / "tokenizer_config.json"
        return json.loads(file.read_bytes()) if file.is_file() else {}

    def special_text(self, name: str) -> str | None:
        """The spelling of a token that the settings name, such as ``eos_token``."""
        token = self.settings.get(name)
        return token.get("content") if isinstance(token, dict) else token

    def left_out(self) -> list[str]:
        """The special tokens that the tokenizer would put after a text, but :meth:`encode` leaves out."""
        return [self.token_text(token) or str(token) for token in self._around[1]]

    def encode_continuation(self, text: str) -> list[int]:
        """Returns the token IDs of text that follows other text, without added special tokens.

        Raises ValueError if the text has half of a surrogate pair, which JSON can hold.
        """
        return self.encode_to(text, ())[0]

    def encode_to(self, text: str, places: Sequence[int]) -> tuple[list[int], list[int]]:
        """Encodes as :meth:`encode_continuation`. Also counts the tokens that end at or before each place."""
        tokenizer, known, read = self._tokenizer, {}, lambda part: part
        if PLAIN in text:
            (tokenizer, known), read = self._apart, self._written
        try:
            self._check_length(text.replace(PLAIN, ""))
            encoding = tokenizer.encode(read(text), add_special_tokens=False)
        except TypeError as error:
            raise ValueError(
                "Text must be valid Unicode, but half of a surrogate pair is in it."
            ) from error
        ends = [end for _, end in encoding.offsets] if places else []
        ids = [known.get(token, token) for token in encoding.ids]
        if self._unknown in ids and len(self.unread) < _MOST_UNREAD:
            pairs = zip(ids, encoding.offsets, strict=True)
            parts = {read(text)[slice(*place)] for token, place in pairs if token == self._unknown}
            spelled = self.token_text(self._unknown)
            self.unread |= {part for part in parts if part.removeprefix(WRITTEN) != spelled}
        return ids, [bisect_right(ends, len(read(text[:place]))) for place in places]

    @functools.cached_property
    def _unknown(self) -> int:
        own = getattr(self._tokenizer.model, "unk_token", None) or self.special_text("unk_token")
        return self.vocabulary().get(own or "", -1)

    @functools.cached_property
    def special(self) -> re.Pattern[str]:
        """A pattern that matches special tokens in text, trying the longest first."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        names = [t.content for t in added if t.special or _MARK.fullmatch(t.content)]
        names = sorted(filter(None, names), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names)) or r"(?!)")

    def _written(self, text: str) -> str:
        marked = self.special.sub(rf"{WRITTEN}\g<0>", text.replace(WRITTEN, "\ufffd"))
        return marked.replace(PLAIN, "")

    @functools.cached_property
    def _apart(self) -> tuple[Tokenizer, dict[int | None, int]]:
        """A tokenizer that reads special tokens only after a mark, and a map of its ids to the model's."""
        apart = Tokenizer.from_str(self._tokenizer.to_str())
        apart.encode_special_tokens = True
        found, marked = {}, []
        for token, one in self._tokenizer.get_added_tokens_decoder().items():
            if self.special.fullmatch(one.content):
                text, strips = WRITTEN + one.content, {"lstrip": one.lstrip, "rstrip": one.rstrip}
                marked.append(AddedToken(text, normalized=False, **strips))
                found[token] = one.content
        # All at once, because each call builds the tokenizer's search anew.
        apart.add_special_tokens([*found.values()])
        apart.add_tokens(marked)
        known = {apart.token_to_id(WRITTEN + text): token for token, text in found.items()}
        return apart, known

    def _check_length(self, text: str) -> None:
        """Raises TextTooLong once the pieces of a text have too many tokens.

        Tokenizing takes hundreds of bytes per character, so the text is tokenized piece by piece. A
        limit of characters would not do, because one token may be a long run of blanks. A cut within a
        token may add a token per character, so the longest token's length is subtracted for each piece.
        """
        most = self._most_tokens
        if most is None or len(text) <= max(4 * most, _PIECE_CHARS):
            return
        num_found, size = 0, max(_PIECE_CHARS, 2 * self.longest_token**2)
        for start in range(0, len(text), size):
            piece = self._tokenizer.encode(text[start : start + size], add_special_tokens=False)
            num_found += len(piece.ids) - self.longest_token
            if num_found > most:
                raise TextTooLong(most, "more")

    def count(self, text: str) -> int:
        return len(self.encode_continuation(text))

    def encode_chat(
        self, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()
    ) -> list[int]:
        """Returns the token IDs of a conversation and of the start of the assistant's turn."""
        text = self.template.render(messages, tools=tools)
        if self.prompt_end is None:
            self.prompt_end = self._checked_end(messages, text, tools)
        # The template writes the special tokens itself.
        return self.encode_continuation(text)

    def _checked_end(
        self, messages: list[dict[str, Any]], text: str, tools: Sequence[dict[str, Any]]
    ) -> str:
        ids = self.encode_continuation(text.rstrip())
        end = self.token_text(ids[-1]) if ids and ids[-1] in self._eos else None
        if end is not None and text != self.template.render(
            messages, opens_turn=False, tools=tools
        ):
            raise ValueError(
                f"The chat template of {self._path} must open the assistant's turn, but what it adds "
                f"for add_generation_prompt ends with {end!r}, which ends a completion. Correct the "
                "template."
            )
        return end or ""

    def reply_text(
        self,
        messages: Sequence[dict[str, Any]],
        turn_ids: Sequence[int],
        *,
        tools: Sequence[dict[str, Any]] = (),
    ) -> str:
        """Renders the messages that follow an assistant's turn, and the start of the next turn.

        The text is taken from a short artificial conversation: rendering the real one at each turn would
        cost the square of its length. The end-of-turn token is left out if ``turn_ids`` end with it.
        """
        before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _TURN}]
        _, reply = self._around_turn([*before, *messages], tools=tools)
        last = turn_ids[-1] if turn_ids else None
        if last in self._eos and (end := self._tokenizer.id_to_token(last)):
            reply = reply.removeprefix(end)
        return reply

    def unfinished_text(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()
    ) -> str:
        """The text of a conversation up to the end of its last message, which the model continues."""
        *before, last = messages
        opened = {**last, "content": (last.get("content") or "") + _TURN}
        return self._around_turn([*before, opened], opens_turn=False, tools=tools)[0]

    def _around_turn(self, messages: Sequence[dict[str, Any]], **settings: Any) -> tuple[str, str]:
        """Renders a conversation. Returns the text before and after the placeholder :data:`_TURN`."""
        before, mark, behind = self.template.render(messages, **settings).rpartition(_TURN)
        if not mark:
            raise ValueError(
                "The model's chat template must render an assistant message unchanged, but it omits the "
                "message, which nothing can follow. An environment may observe in text instead of messages."
            )
        return before, behind

    def encode_observation(self, text: str, *, has_special_tokens: bool) -> list[int]:
        """Encodes an observation. Without ``has_special_tokens``, spelled special tokens are plain text."""
        return self.encode_continuation(
            text if has_special_tokens else marked_plain(self.special, text)
        )

    def single_token(self, text: str) -> int | None:
        ids = self.encode_continuation(text)
        return ids[0] if len(ids) == 1 else None

    def vocabulary(self) -> dict[str, int]:
        """Maps the spelling of each token to its id, added tokens included."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    @property
    def largest_id(self) -> int:
        return max(self.vocabulary().values(), default=-1)

    def unknown_ids(self, vocab_size: int, known: Sequence[int]) -> tuple[int, ...]:
        """Returns the model's ids that are neither tokens nor ``known``, such as vocabulary padding."""
        ids = {*self.vocabulary().values(), *known}
        return tuple(token for token in range(vocab_size) if token not in ids)

    def token_text(self, token_id: int) -> str | None:
        return self._tokenizer.id_to_token(token_id)

    def has_chat_template(self) -> bool:
        is_file = (self._path / "chat_template.jinja").is_file()
        return is_file or bool(self.settings.get("chat_template"))

    def end_of_turn(self) -> str | None:
        """Returns the special token that the chat template writes after an assistant's message."""
        turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _TURN}]
        rest = self.template.render(turn, opens_turn=False).rpartition(_TURN)[2].lstrip()
        ids = self.encode_continuation(rest)
        text = self._tokenizer.id_to_token(ids[0]) if ids else None
        # Only a special token is spelled in one piece and left out when text is decoded.
        is_special = not self._tokenizer.decode(ids[:1], skip_special_tokens=True)
        return text if is_special else None

    @functools.cached_property
    def template(self) -> ChatTemplate:
        special = None if self._reads_special else self.special
        return ChatTemplate(self._path, self._chat_kwargs, self._date, special)

    def decode(self, completion_ids: Sequence[int], kept: Collection[str] = ()) -> str:
        """Decodes a completion. Leaves out its final end of sequence, and special tokens not in ``kept``."""
        ids = list(completion_ids)
        if ids and ids[-1] in self._eos:
            ids.pop()
        ids = [token for token in ids if self._special.get(token) in (None, *kept)]
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    @functools.cached_property
    def _special(self) -> dict[int, str]:
        added = self._tokenizer.get_added_tokens_decoder()
        return {token: one.content for token, one in added.items() if one.special}

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes of one token. A token may hold only some bytes of a character."""
        text, spelled = self.decode_exactly([token_id]), self.token_text(token_id) or ""
        if "\ufffd" not in text:
            return text.encode()
        if found := _BYTE.fullmatch(spelled):
            return bytes.fromhex(found[1])
        if _BYTE_OF.keys() >= set(spelled):
            return bytes(_BYTE_OF[letter] for letter in spelled)
        return text.encode()

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Returns the text of each token behind other text; together they are the text of all.

        A character of several tokens is the text of the last of them, and that of the others is empty.
        """
        found = list[bytes]()
        pieces = [self._pieces.get(token) or self._piece(token) for token in token_ids]
        for is_byte, same in itertools.groupby(pieces, operator.itemgetter(1)):
            parts = [part for part, _ in same]
            if is_byte and (run := b"".join(parts)) != run.decode(errors="ignore").encode():
                # Tokenizers with byte fallback replace each byte of a run that is not valid.
                parts = ["\ufffd".encode()] * len(parts)
            found += parts
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # The end belongs to the last token.
        return [decoder.decode(part, i == len(found)) for i, part in enumerate(found, 1)]

    def _piece(self, token: int) -> tuple[bytes, bool]:
        """The bytes of a token behind another one, and whether it stands for one byte by its number."""
        # Alone, a token may lose the blank with which it begins.
        once, twice = (self.decode_exactly([token] * number) for number in (1, 2))
        is_whole = "\ufffd" not in twice and twice.startswith(once)
        piece = twice[len(once) :].encode() if is_whole else self.token_bytes(token)
        self._pieces[token] = piece, bool(_BYTE.fullmatch(self.token_text(token) or ""))
        return self._pieces[token]

    def excerpt(self, token_ids: Sequence[int]) -> str:
        """Returns the text of tokens as a Python literal; the middle of a long text is left out."""
        text = repr(self.decode_exactly(token_ids))
        return re.sub(r"^(.{150}).{20,}(.{150})$", r"\1 ... \2", text)

    def decode_exactly(self, token_ids: Sequence[int]) -> str:
        """Returns the text of tokens with all special tokens, as the model reads them."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
