# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

r"""Units of measurement in answers, such as ``5\text{ cm}``, ``25 cm²``, ``\$3`` or ``42 apples``.

A unit that only one of two answers states is ignored. If both state one, the quantities must be
equal: ``5 m`` is ``500 cm`` and neither ``5 cm`` nor ``5 s``. Each unknown word is a unit of its own.
"""

import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

from torchtitan.grpo.rewards.answer_kinds import plain_text
from torchtitan.grpo.rewards.answer_text import TEXT_COMMAND

# For everything that is measured, how many of its first unit each unit is, and the unit's names. Names with a
# star take the prefixes of the metric system.
_TABLE = """
length: 1 m* meter* metre*; 0.0254 in inch inches; 0.3048 ft foot feet; 0.9144 yd yard; 1609.344 mi mile
mass: 1 g* gram* gramme* gm; 1000000 t tonne; 453.59237 lb pound; 28.349523125 oz ounce
time: 1 s* sec* second*; 60 min minute mins; 3600 h hr hour; 86400 d day; 604800 wk week
year: 1 yr year; 1/12 mo month
volume: 0.001 l* L* liter* litre*; 0.000001 cc; 0.003785411784 gal gallon
area: 10000 ha hectare; 4046.8564224 acre
speed: 0.44704 mph; 5/18 kmh kph kmph
energy: 1 J* joule*; 3600 Wh*
calorie: 1 cal* calorie*
power: 1 W* watt*
force: 1 N* newton*
pressure: 1 Pa* pascal*
frequency: 1 Hz* hertz*
voltage: 1 V* volt*
current: 1 A* amp* ampere*
resistance: 1 Ω* ohm*
charge: 1 C* coulomb*
amount: 1 mol* mole*
information: 1 bit*; 8 B* byte*
kelvin: 1 K* kelvin*
celsius: 1 °C celsius
fahrenheit: 1 °F fahrenheit
angle: 1 ° deg degree
radian: 1 rad* radian*
percent: 1 % percent percentage pct
dollar: 1 $ dollar USD buck; 0.01 ¢ cent
euro: 1 € euro EUR
sterling: 1 £ GBP
yen: 1 ¥ yen JPY
rupee: 1 ₹ rupee Rs INR
"""
_COMPOSED = {"area": {"length": 2}, "volume": {"length": 3}, "speed": {"length": 1, "time": -1}}
# Symbols and, last, the name of each power of ten.
_PREFIXES = {
    "k kilo": 3, "c centi": -2, "m milli": -3, "d deci": -1, "h hecto": 2, "M mega": 6, "G giga": 9, "T tera": 12,
    "u µ μ micro": -6, "n nano": -9,
}  # fmt: skip
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3, "squared": 2, "cubed": 3}
_MULTIPLIERS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
# They say nothing about what is counted, or stand for any unit.
_FILLERS = "a an the of left more remaining altogether each away old long tall wide high unit only"
# Words behind a number that are no units, without a plural's s.
_OPERATORS = (
    "and or to mod time plus minu if for when where with x pi sqrt sin co cos tan log ln exp choose"
)

_DECIMAL = r"(?:\d+(?:\.\d*)?|\.\d+)"
_NUMBER = (
    r"[-+]?\s*(?:\d*\s*\\frac\s*\{[^{}]*\}\s*\{[^{}]*\}|\d*\s*\\sqrt\s*\{[^{}]*\}|"
    rf"{_DECIMAL}(?:\s*/\s*\d+)?(?:\s*(?:\\cdot|\\times)\s*10\s*\^\s*(?:\{{-?\d+\}}|\d))?)(?:\s*\\pi)?"
)
_POWER = r"(?:\s*\^\s*(?:\{\s*-?\d\s*\}|-?\d)|(?<=[A-Za-z])\d(?!\d))"
_WORD = r"[A-Za-zµμΩ°$£€¥₹¢%]+"
_TEXT = rf"{TEXT_COMMAND}\s*\{{[^{{}}]*\}}"

# Signs and what stands in their place: a currency before its number goes behind it.
_CURRENCY = re.compile(
    r"^([-+]?)\s*(?:\\?([$£€¥₹¢])|(USD|EUR|GBP|JPY|Rs)\.?\s)\s*([-+]?)(?=[\d.\\])(.*)", re.DOTALL
)
_CURRENCY_SIGN = re.compile(r"\\?[$£€¥₹¢]")
_SIGN = re.compile(r"(?<=[^\s\\])\s*\\?([%¢€])$")
_DEGREES = re.compile(
    r"^(?!.*\\circ.*\\circ)(.*\S)\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degree)\s*"
    rf"(?:(?:{TEXT_COMMAND}\s*\{{\s*)?([CF])(?:elsius|ahrenheit)?\s*\}}?)?$",
    re.DOTALL,
)
_TEMPERATURE = re.compile(r"\bdeg(?:ree)?s?\.?\s*([CF])(?:elsius|ahrenheit)?\b", re.IGNORECASE)
_POWER_BEHIND = re.compile(r"(\S+)\s+(squared|cubed)", re.IGNORECASE)
_IN_ALL = re.compile(r"\bin\s+(?:total|all)\b", re.IGNORECASE)

# A number with its unit; a formula with a unit that is set as text; and several numbers with units.
_PLAIN = re.compile(rf"(?P<value>{_NUMBER})(?P<unit>\s*{_WORD}(?:[\s./*·-]|{_POWER}|{_WORD})*)")
_SET = re.compile(
    rf"(?P<value>.*?[\w)}}\]!])\s*(?P<unit>(?:{_TEXT}|\\frac\s*\{{{_TEXT}\}}\s*\{{{_TEXT}{_POWER}?\}})"
    rf"(?:\s|/|\\cdot|{_TEXT}|{_POWER}|\{{{_POWER}\}})*)",
    re.DOTALL,
)
_PART = re.compile(rf"({_NUMBER})\s*({_WORD}(?:\s+[A-Za-z]+)*?)(?:\s*,?\s*(?:and\s+)?)(?=\d|$)")
_UNIT_FRACTION = re.compile(r"\\frac\s*\{(.*?)\}\s*\{(.*)\}$")
_TOKEN = re.compile(rf"({_WORD}){_POWER}?|(/)|([*·])")


@dataclass(frozen=True)
class Unit:
    """A unit of measurement. If its name is unknown, only ``words`` is set, to the words of the name.

    ``dimensions`` is what the unit measures, with exponents. ``factor`` is its size relative to the
    base unit of these dimensions.
    """

    factor: Fraction = Fraction(1)
    dimensions: frozenset[tuple[str, int]] = frozenset()
    words: frozenset[str] = frozenset()

    @property
    def only(self) -> str:
        """The dimension, such as ``percent``, if the unit has exactly one, else an empty string."""
        return next(iter(self.dimensions))[0] if len(self.dimensions) == 1 else ""


@dataclass(frozen=True)
class Quantity:
    value: str
    unit: Unit | None = None


def read_quantity(answer: str) -> Quantity:
    r"""Splits an answer, as normalized by `answer_text`, into a value and a unit.

    Example: ``5\text{ cm}^2`` has the value ``5`` and the unit ``cm^2``; ``2x`` has no unit.
    """
    text = _CURRENCY.sub(r"\1\4\5\\text{ \2\3}", answer)
    text = _DEGREES.sub(r"\1\\text{°\2}", _SIGN.sub(r"\\text{\1}", text))
    flat = _flat(text)
    plain, set_as_text = _PLAIN.fullmatch(flat), _SET.fullmatch(text)
    # A letter that touches a number is a variable, unless it is set as text.
    if plain is not None and ("\\" in text or not re.match(r"\S(?!\S)", plain["unit"])):
        quantity = _split(plain)
        words = quantity.unit.words if quantity.unit is not None else frozenset()
        is_product = plain["unit"][0] != " " or all(len(word) == 1 for word in words)
        if not words or not (is_product or _has_operator(words)):
            return quantity
    if (total := _sum(flat)) is not None:
        return total
    if set_as_text is not None:
        quantity = _split(set_as_text)
        if quantity.unit is None or not _has_operator(quantity.unit.words):
            return quantity
    return Quantity(_CURRENCY_SIGN.sub("", answer))


def _has_operator(words: frozenset[str]) -> bool:
    return not words.isdisjoint(_OPERATORS.split())


def _split(found: re.Match[str]) -> Quantity:
    value = found["value"].strip()
    words = _UNIT_FRACTION.sub(r"\1/\2", _flat(found["unit"])).split()
    if words and words[0].lower() in _MULTIPLIERS:
        value = f"{value}\\cdot 10^{{{_MULTIPLIERS[words.pop(0).lower()]}}}"
    return Quantity(value, _unit(" ".join(words)))


def _sum(text: str) -> Quantity | None:
    """Reads a sum such as ``2 hours 30 minutes`` as one quantity in its first unit. Else ``None``."""
    parts = list(_PART.finditer(text))
    if len(parts) < 2 or "".join(part[0] for part in parts) != text:
        return None
    units = [_unit(part[2]) or Unit() for part in parts]
    first = units[0]
    if not first.dimensions or any(unit.dimensions != first.dimensions for unit in units):
        return None
    terms = zip(parts, units, strict=True)
    return Quantity(
        "+".join(scaled(part[1], unit.factor / first.factor) for part, unit in terms), first
    )


def _flat(answer: str) -> str:
    return re.sub(r"\s+(?=\^)", "", plain_text(answer.replace("\\cdot", "*")))


def _unit(text: str) -> Unit | None:
    """Parses the name of a unit. Returns ``None`` if it has only filler words such as ``units``."""
    text = _IN_ALL.sub("", _TEMPERATURE.sub(lambda found: "°" + found[1].upper(), text))
    tokens = [
        (found[1] or found[2] or "*", int(re.sub(r"[^-\d]", "", found[0]) or 1))
        for found in _TOKEN.finditer(_POWER_BEHIND.sub(r"\2 \1", text))
        if _stem(found[0]) not in _FILLERS.split()
    ]
    factor, dimensions = Fraction(1), Counter[str]()
    sign, next_power = 1, 1
    for word, power in tokens:
        if word in ("/", "per", "*"):
            sign = 1 if word == "*" else -1
        elif word.lower() in _POWERS:
            next_power = _POWERS[word.lower()]
        elif (known := _lookup(word)) is None:
            return Unit(words=frozenset(_stem(word) for word, _ in tokens if word not in "/*"))
        else:
            exponent, next_power = sign * power * next_power, 1
            factor *= known[1] ** exponent
            for kind, times in _COMPOSED.get(known[0], {known[0]: 1}).items():
                dimensions[kind] += times * exponent
    if not any(dimensions.values()):
        return None
    return Unit(factor, frozenset((k, n) for k, n in dimensions.items() if n))


def _stem(word: str) -> str:
    word = word.lower()
    if word.endswith("ies"):
        return word[:-3] + "y"
    return word[:-1] if word.endswith("s") and not word.endswith("ss") else word


def _lookup(word: str) -> tuple[str, Fraction] | None:
    """Returns what a unit measures and the unit's size, or ``None`` if the unit is unknown."""
    forms = (
        form
        for name in (word, word.lower())
        for form in (name, name.removesuffix("s"), name.removesuffix("es"))
    )
    return next((_UNITS[form] for form in forms if form in _UNITS), None)


def _read_table() -> dict[str, tuple[str, Fraction]]:
    units: dict[str, tuple[str, Fraction]] = {}
    prefixed: dict[str, tuple[str, Fraction]] = {}
    for line in _TABLE.strip().splitlines():
        kind, *entries = re.split(r"[:;] ", line)
        for size, *names in map(str.split, entries):
            for name in names:
                units[name.rstrip("*")] = (kind, Fraction(size))
            for name in (name[:-1] for name in names if name.endswith("*")):
                for prefixes, power in _PREFIXES.items():
                    *symbols, word = prefixes.split()
                    for prefix in symbols if len(name) <= 3 else [word]:
                        prefixed[prefix + name] = (kind, Fraction(size) * Fraction(10) ** power)
    return prefixed | units


_UNITS = _read_table()


def scaled(value: str, factor: Fraction) -> str:
    if factor == 1:
        return value
    return f"({value})\\cdot\\frac{{{factor.numerator}}}{{{factor.denominator}}}"
