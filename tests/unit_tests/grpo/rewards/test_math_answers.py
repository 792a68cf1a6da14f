# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Pairs of an expected and a given answer by kind, and what ``boxed_math`` says of them."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from torchtitan.grpo.rewards import math_answers
from torchtitan.grpo.rewards.answer_text import without_thousands_separators
from torchtitan.grpo.rewards.builtin import boxed_math, last_number

# For each kind, pairs that are the same answer, and pairs that are not. The first is the expected one.
SAME = {
    "units": [
        (r"5\text{ cm}", "5"), ("5", r"5\text{ cm}"), ("7", r"7~\mathrm{kg}"), ("7", r"7\,\text{m/s}"),
        (r"12\text{ cm}^2", r"12\mathrm{cm}^2"), (r"12\text{ cm}^2", r"12\text{ square centimeters}"),
        (r"12\text{ m}^3", "12 cubic metres"), ("12 m^2", "12 squared meters"), ("12", r"12\text{ cm}^{2}"), ("12", "12 cm²"),
        (r"9\text{ kilometers}", r"9\text{ km}"), ("60 mph", "60 miles per hour"), ("3", "3 hours"),
        ("500 cm", "5 m"), (r"2\text{ h}", r"120\text{ min}"), ("1.5 kg", "1500 g"), ("90 min", "1 hour 30 minutes"),
        ("18 km/h", "5 m/s"), ("5 m/s", "5m/s"), ("9 m^2", "9m^2"), (r"9.8\text{ m/s}^2", r"9.8\ \mathrm{m/s^2}"), ("6 N", r"6\text{ newtons}"),
        ("3 L", "3000 mL"), ("2 GB", "2000 MB"), (r"2\sqrt{3}\text{ cm}", r"2\sqrt{3}"), ("5 ft 6 in", "66 inches"),
        (r"\frac{1}{2}\text{ inch}", "0.5 in"), ("25^\\circ C", "25 °C"), ("25^\\circ C", r"25^\circ\text{C}"),
        ("98.6", "98.6°F"), (r"5\text{ units}", r"5\text{ cm}"), ("14 square units", "14"), ("42", "42 apples"),
        ("42 apple", r"42\text{ apples}"), ("42 red apples", "42 apples"), ("x=5 \\text{ cm}", "5"), ("3", "3 km"),
        ("8", "8 in"), ("5", "5 years old"), (r"10\pi\text{ cm}", r"10\pi"), ("20", r"20\text{ m}^2"),
        ("36", r"36\,\frac{\text{km}}{\text{h}}"), ("9", r"9\text{ N}\cdot\text{m}"), ("12", "12 days"), ("12 marbles", "12"),
    ],
    "money": [
        ("$5", "5"), (r"\$5", "5 dollars"), ("5", "€5"), ("5", r"\$5.00"), ("50 cents", r"\$0.50"),
        ("-$5", "-5"), ("$1,250.50", "1250.5"), ("5 million", "5000000"), (r"\$2.5\text{ million}", "2500000"),
        ("£3", "3 GBP"), ("7", "7 USD"),
    ],
    "percent": [
        (r"50\%", "0.5"), ("50%", r"\frac{1}{2}"), ("10%", "10"), ("10", r"10\%"), ("12.5%", "12.5"),
        ("12.5%", "0.125"), ("5 percent", r"5\%"), ("0.05", "5 percent"), (r"33\frac{1}{3}\%", r"\frac{1}{3}"),
    ],
    "degrees": [
        (r"30^\circ", "30"), (r"30^{\circ}", "30°"), ("30", "30º"), ("90", "90 degrees"), (r"45\degree", r"45\text{ degrees}"),
        ("60", "60˚"), (r"180^\circ", r"\pi"),
    ],
    "fractions": [
        (r"\frac{1}{2}", "½"), ("¾", "0.75"), ("⅓", r"\frac13"), ("⅞", "7/8"), ("⅒", "0.1"), ("3⁄4", "0.75"),
        (r"\dfrac{1}{2}", r"\tfrac12"), (r"\frac{3}{2}", "1½"), ("3/2", "1 1/2"), (r"1\frac12", "1.5"),
        ("-1½", "-1.5"), (r"2\frac{3}{4}", "2 and 3/4"), ("0.5", ".5"), (r"-\frac12", r"\frac{-1}{2}"),
        (r"\frac{1}{2}", r"\left(\frac{1}{2}\right)"), (r"\frac{1}{2}", r"\frac 1 2"), ("0.5", r"\frac1{2}"),
        ("1/2", r"\frac{1} 2"), ("3/4", r"\tfrac 3 4"), (r"\pi/2", r"\frac \pi 2"), ("x/2", r"\frac x 2"), ("1.5", r"1 \frac 1 2"),
        ("-0.5", r"-\frac 1 2"), ("0.75", r"\frac 3 4 \text{ m}"), (r"\frac 1 2", "0.5"), (r"\frac{3}{x}", r"\cfrac 3 x"),
        ("1/2", r"\nicefrac{1}{2}"), ("1/2", r"\sfrac12"), ("1/2", r"\frac~1~2"), ("1/2", r"\frac{1}~{2}"), (r"\frac{1}{\sqrt{2}}", r"\frac1\sqrt2"),
        (r"\frac{\sqrt{3}}{2}", r"\frac\sqrt3 2"), ("1/2", r"1 \over 2"), (r"\frac{x+1}{y}", r"{x+1 \over y}"), ("1.5", r"{1 \over 2}+1"),
        ("x^{1/2}", r"x^{1 \over 2}"), ("10", r"{5 \choose 2}"), ("11", r"{5\choose2}+1"), ("10", r"5 \choose 2"), ("10", r"\binom52"),
    ],
    "styles": [
        *(("42", text) for text in (
            r"\textcolor{red}{42}", r"\color{red}{42}", r"{\color{red} 42}", r"\colorbox{red}{42}", r"\textcolor[rgb]{1,0,0}{42}", r"{\bf 42}",
            r"\bf{42}", r"\bfseries 42", r"\bold{42}", r"\boldsymbol{42}", r"\bm{42}", r"\mathbf 42", r"\underline{42}", r"\emph{42}",
            r"\ensuremath{42}", r"\large 42", r"{\Huge 42}", r"\displaystyle 42", r"\texttt{42}",
        )),
        ("1/2", r"{\bf \frac12}"), ("1/2", r"\textcolor{red}{\frac12}"), ("5 cm", r"5~{\rm cm}"), ("5 cm", r"5\,\rm cm"), ("5 cm", r"5\mathrm cm"),
        ("east", r"{\bf east}"), ("x", r"{\bf x}"), (r"x \in \mathbb{R}", r"x \in \mathbb R"),
    ],
    "logarithms": [
        ("3", r"\log_2 8"), ("3", "log_2 8"), ("3", r"\log_28"), ("3", r"\log _2 8"), ("3", r"\log_{2} 8"), ("4", r"\log_2 8 + 1"),
        ("4", r"\log_3 81"), ("2", r"\log_{10} 100"), ("2", r"\lg 100"), ("-3", r"\log_2 \frac 1 8"), ("10", r"\binom 5 2"),
        ("-3", r"\log_\frac{1}{2} 8"), ("-3", r"\log_\frac12 8"), ("2", r"\log_\sqrt2 2"), ("2", r"\log_\pi \pi^2"),
    ],
    "arguments without braces": [
        ("2", r"\sqrt[3]8"), ("2", r"\sqrt[3] 8"), ("2", r"\sqrt[\frac62] 8"), (r"\sqrt{\pi}", r"\sqrt\pi"), ("1/2", r"\sqrt\frac{1}{4}"),
        ("1/2", r"\sqrt\frac14"), ("2", r"\sqrt\sqrt{16}"), ("2", r"8^\frac13"), ("1/4", r"8^{-\frac23}"), (r"2^{\sqrt{2}}", r"2^\sqrt2"),
        ("3", r"\sqrt 9"), (r"\sqrt{2}x", r"\sqrt2x"), ("x_1", "x_{1}"),
    ],
    "powers and roots": [
        ("x²", "x^2"), ("x^{10}", "x¹⁰"), ("10⁻³", "0.001"), ("x^10", "x^{10}"), ("x**2", "x^2"), ("2^10", "1024"),
        ("√2", r"\sqrt{2}"), ("3√2", r"\sqrt{18}"), (r"\sqrt[3]{5}", "∛5"), ("√(x+1)", r"\sqrt{x+1}"),
        ("2sqrt(3)", r"2\sqrt3"), ("a₁", "a_1"), (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"),
    ],
    "signs": [
        ("-5", "–5"), ("-5", "−5"), ("-5", "—5"), ("-5", "‑5"), ("-5", "－5"), ("2-x", "2−x"), ("π", r"\pi"),
        ("2π", r"2\pi"), ("α+β", r"\alpha+\beta"), ("∞", r"\infty"), ("3×4", "12"), ("8÷2", "4"), ("３", "3"),
        ("𝟓", "5"), ("±3", r"\pm 3"), (r"\pm 3", "3, -3"), ("x≤2", r"x\le 2"), ("x ≠ 1", r"x \neq 1"), ("2·3", "6"),
        (r"\{1,2\}∪\{3\}", r"\{1,2,3\}"),
    ],
    "scientific notation": [
        ("1.2e3", "1200"), ("1200", "1.2E3"), ("1200", r"1.2\times10^3"), ("1200", r"1.2 \cdot 10^{3}"), ("1200", "1.2×10³"),
        ("1200", "1.2*10^3"), ("1200", "1.2 x 10^3"), ("0.0012", "1.2e-3"), ("0.0012", "1.2×10⁻³"), ("10^6", "1e6"),
        ("6.02e+23", r"6.02\times10^{23}"), ("1e400", r"10\times10^{399}"),
    ],
    "repeating decimals": [
        (r"0.\overline{3}", r"\frac13"), (r"\frac13", r"0.\bar{3}"), ("1/3", "0.(3)"), ("1/6", "0.1(6)"), ("1/3", "0.333..."),
        ("1/3", r"0.333\ldots"), ("1/6", "0.1666…"), ("1/3", r"0.\dot{3}"), ("1/7", r"0.\overline{142857}"), ("1", r"0.\overline{9}"),
        (r"\frac{5}{27}", r"0.\dot{1}8\dot{5}"), ("-7/3", r"-2.\overline{3}"), ("2/11", "0.1818..."), ("1/3", "0.3̅"),
    ],
    "markup": [
        ("73", "_73_"), ("73", "**Answer:** 73"),
        ("73", "**73**"), ("73", "*73*"), ("73", "__73__"), ("73", "`73`"), ("73", r"\textbf{73}"), ("73", r"\mathbf{73}"),
        ("73", "$73$"), ("73", r"\(73\)"), ("73", "73."), (r"\(73\)", "73"), ("73", r"\text{73}"), ("73", "{73}"),
        ("73", r"\,73\,"), ("73", "**73 apples**"), ("73", r"\mathrm{73}"),
    ],
    "prose": [
        ("42", "approximately 42"), ("3.14", r"\approx 3.14"),
        ("5", r"\text{The answer is }5"), ("5", r"\text{The answer is 5}"), ("5", "The final answer is 5."), ("5", "Answer: 5"),
        ("The value of x is 5.", "5"), ("So the result is $5$.", "5"), ("The answer is 5 cm.", "5"), ("5", "Therefore, the answer is 5"),
        ("The final answer is: \\(5\\)", "5"),
    ],
    "equations": [
        ("5", "x=5"), ("x=5", "5"), ("x=5", "x = 5"), ("5", "3+2=5"), ("5", "f(2)=5"), ("5", "S_5=5"), ("5", "a+b=5"),
        ("5", r"\text{Area}=5"), ("5", r"|AB|=5"), ("5", r"\angle A = 5^\circ"), ("y=2x+1", "2x+1"), ("2x+1", "y=2x+1"),
        ("y=2x+1", "2x-y+1=0"), ("x^2", "f(x)=x^2"), ("5", r"x=\frac{10}{2}=5"), ("5", r"\frac{10}{2}=5"), ("x=1, y=2", "y=2, x=1"),
        (r"\frac12", r"P(A)=\frac12"), ("5", r"AB = 5\text{ cm}"), ("1,2", "x=1 \\text{ or } x=2"), ("5", r"\alpha=5"),
    ],
    "intervals": [
        (r"(-\infty,2]", r"x\le 2"), (r"(-\infty,2]", "x ≤ 2"), ("(1,2)", "1<x<2"), ("[1,2]", r"1\le x\le 2"), ("1<x<2", "(1,2)"),
        (r"(2,\infty)", "x>2"), (r"x\in(1,2)", "(1,2)"), ("(1,2)", r"x\in(1,2)"), (r"[0,1)\cup(2,3]", r"[0,1) \cup (2,3]"),
        ("x>5", "5<x"), (r"\mathbb{R}", r"(-\infty,\infty)"), (r"(-\infty,1)\cup(2,\infty)", r"x<1 \text{ or } x>2"),
        (r"x<1 \text{ or } x>2", r"(-\infty,1)\cup(2,\infty)"), (r"x \geq 3", r"[3,\infty)"),
        ("(1,2)", "x>1 and x<2"), (r"x<-1 \text{ or } x=0", r"(-\infty,-1)\cup\{0\}"),
    ],
    "lists": [
        (r"\{(1,2),(3,4)\}", "(1,2),(3,4)"),
        ("1,2", "2,1"), (r"\{1,2\}", "1,2"), (r"\{1,2\}", r"\{2,1\}"), ("(1,2)", "(1, 2)"), ("(1,2),(3,4)", "(3,4),(1,2)"),
        ("1, 2, 3", "1 and 2 and 3"), ("1,2", r"1 \text{ and } 2"), (r"\left(1,2\right)", "(1,2)"), ("(1,2)", "1,2"),
        ("(1,2,3)", r"(1, \frac{4}{2}, 3)"), ("red, blue", "blue and red"), (r"3\text{ cm}, 4\text{ cm}", r"4\text{ cm}, 3\text{ cm}"),
    ],
    "words": [
        ("east", r"\text{east}"), ("East", "east"), ("Evelyn", r"\textbf{Evelyn}"), ("yes", "Yes."), ("True", r"\text{true}"),
        ("no solution", r"\text{No solution}"), (r"\emptyset", r"\text{no solution}"), (r"\varnothing", r"\emptyset"), (r"\{\}", "∅"),
        ("does not exist", "DNE"), ("New York", r"\text{New  York}"), ("no", r"\text{no}"), ("isosceles", r"\mathrm{isosceles}"),
        ("xy", "yx"), ("pqr", "rpq"), ("答案", r"\text{答案}"),
    ],
    "choices": [
        ("C", "C. 12"), ("C", "C) 12"),
        ("A", r"\text{A}"), ("A", "(A)"), ("(A)", "A"), ("B", r"\text{(B)}"), ("C", "C."), ("D", "D)"), ("A", r"\textbf{(A)}"),
        ("A", "(A) 12"), ("12", "(A) 12"), ("12", r"\textbf{(A)}\ 12"), ("B", r"\mathrm{B}"),
    ],
    "times and dates": [
        ("7:30", r"7:30 \text{ PM}"), ("7:30 PM", "19:30"), ("7:30 PM", "7:30 p.m."), ("7:00 AM", "7 AM"), ("12:00 AM", "0:00"), ("12:30", "12:30 AM"),
        ("2024-01-05", "January 5, 2024"), ("1/2/2024", "01/02/2024"), ("5 March 2024", "March 5th, 2024"),
        ("May 3", "3 May"), ("2024-01-05", "2024/1/5"), ("07:30", "7:30"),
    ],
    "bases": [
        ("10110_2", "10110_{2}"), ("10110_2", "10110"), ("10110_2", "10110₂"), (r"1A_{16}", "1a_{16}"), ("FF_{16}", "(FF)_{16}"),
        ("1011_2", r"1011_{\text{two}}"), ("2010_3", "2010 (base 3)"), ("10110", "10110_2"),
    ],
    "separators": [
        ("1,234", "1234"), ("1234567", "1,234,567"), ("1234", r"1{,}234"), ("1234.5", "1,234.50"), ("12345", r"12\,345"), ("4200", "4,200.00"),
    ],
    "ratios": [("1:2:3", "2:4:6"), ("3:2", "3:2"), ("3:2", "6:4"), ("3:2", r"\frac{3}{2}"), ("1:2:3", "1:2:3"), ("10:15", "2:3")],
    "formulas": [
        ("2pi", r"2\pi"), ("10 pi", r"10\pi"), ("sin x", r"\sin x"), ("2sin(x)", r"2\sin x"), ("pi/4", r"\frac{\pi}{4}"),
        ("x^2+2x+1", "(x+1)^2"), (r"2\sqrt{3}", r"\sqrt{12}"), ("1+2i", "2i+1"), ("5!", "120"), (r"\binom{5}{2}", "10"),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}"), ("2n\\pi", r"2\pi n"), (r"\frac{x}{2}", "x/2"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\ 2\end{pmatrix}"), (r"e^{2x}", r"(e^x)^2"), ("1/3", "0.333333"),
        (r"\log 8", r"3\log 2"), ("3.0", "3"), ("100000000000000000001", "100000000000000000001.0"), ("+5", "5"),
    ],
}  # fmt: skip
OTHER = {
    "units": [
        (r"5\text{ cm}", r"5\text{ m}"), ("5 kg", "5 g"), (r"5\text{ cm}", r"5\text{ cm}^2"), ("5 m", "5 s"), ("5 km/h", "5 m/s"), ("5 m/s", "5m/h"), ("5 s", "5 min"),
        (r"25^\circ C", r"25^\circ F"), ("42 apples", "42 oranges"), ("42", "43 apples"), ("30", "2 hours 30 minutes"),
        ("5 cm", "5 apples"), (r"5\mathrm{mL}", r"5\mathrm{L}"), ("5 miles", "5 km"), ("5", "5x"), ("5m", "5n"), ("3 ft", "3 in"), ("5 ft 6 in", "5"),
        ("7 N", "7 J"), ("3x", "3"), ("5 cubic meters", "5 square meters"), ("6 m", "600 mm"),
    ],
    "money": [("$5", "€5"), (r"\$5", "5 cents"), ("$5", "$6"), ("5 million", "5"), ("5 million", "5 billion"), ("£5", "$5")],
    "percent": [(r"50\%", r"5\%"), ("10", "0.1"), ("50%", "0.05"), ("0.5%", "50"), ("10%", "100%"), ("10%", "11")],
    "degrees": [(r"30^\circ", r"60^\circ"), ("30°", "31"), (r"30^\circ", r"30\text{ cm}"), ("45", r"\frac{\pi}{4}"), ("90", "-90°")],
    "fractions": [("½", "⅓"), (r"1\frac12", r"\frac12"), ("1½", "2½"), ("3/4", "4/3"), ("1 1/2", "11/2"), (r"\frac{1}{2}", "1"), ("1/3", "0.33")],
    "arguments without braces": [
        ("2", r"\sqrt[3]9"), ("2", r"8^\frac12"), ("2", r"{5 \choose 2}"), ("1/2", r"{2 \over 1}"), ("42", r"{\bf 24}"), ("1/2", r"\frac"), ("5", r"\sqrt"),
        ("42", r"\textcolor{42}{43}"), ("3", r"\sqrt[3"), ("1/2", r"\frac}12{"),
    ],
    "powers and roots": [("x²", "x³"), ("x^2", "x_2"), ("10⁻³", "10³"), ("√2", "2"), ("√2", "∛2"), ("2^10", "20"), ("a₁", "a₂")],
    "signs": [("-5", "5"), ("5", "–5"), ("2-x", "2+x"), ("π", "ρ"), ("∞", "-∞"), ("±3", "3"), ("3", "±3"), ("x≤2", "x<2"), ("x≤2", "x≥2")],
    "scientific notation": [
        ("1.2e3", "1.2e4"), ("1e-7", "2e-7"), ("0", "1e-9"), ("1e400", "2e400"), ("1.2×10³", "1.2×10⁴"), (r"6.02\times10^{23}", "6.02e22"), ("10^{1000}", "10^{1001}"),
    ],
    "repeating decimals": [
        (r"0.\overline{3}", "0.3"), ("1/3", r"0.\overline{34}"), (r"0.1\overline{6}", r"0.\overline{16}"), ("0.(3)", "0.(4)"), ("1/3", "0.3"), ("0.333...", "0.33"),
    ],
    "markup": [("8", "2**3**2"), ("73", "**74**"), ("73", "`37`"), ("73", ""), ("73", r"\text{}"), ("73", "**")],
    "prose": [
        ("5", r"\text{The answer is }6"), ("5", "The answer is not 6"), ("The value of x is 5.", "6"), ("5", r"\text{I do not know}"), ("5", "5 because 2+3=6"),
    ],
    "equations": [
        ("5", "1=5"), ("5", "3+2=6"), ("5", "2x=5"), ("5", "x+1=5"), ("5", "0=5"), ("5", "x^2=5"), ("5", "5=6"), ("x=5", "y=5"), ("x=1, y=2", "x=2, y=1"),
        ("a=1,b=2", "a=2,b=1"), ("5", "x=2+2=5"), ("5", r"\frac{1}{2}=5"), ("y=2x+1", "y=2x+2"), ("1,2,3", "n=2,3,4"), ("5", r"x\ne 5"),
    ],
    "intervals": [
        (r"(-\infty,2]", r"(-\infty,2)"), (r"(-\infty,2]", "x<2"), ("(1,2)", r"1\le x\le 2"), ("(1,2)", "1<x<3"), ("(1,2)", "[1,2]"), ("x>5", "x<5"), ("x>5", "5"),
        ("5", "x>5"), ("5", r"1\le x\le 10"), (r"[0,1)\cup(2,3]", "[0,1)"), ("x>5", r"x\ge 5"), ("(2,1)", r"[2,\infty)"), (r"(-\infty,1)\cup(2,\infty)", r"x<1 \text{ or } x>3"), ("(1,2)", "x>1 or x<2"),
    ],
    "lists": [
        ("(1,2)", r"\{1,2\}"), (r"\{1,2\}", "(1,2)"), ("(1,2)", r"\{2,1\}"), ("(1,2)", "(2,1)"), ("(1,2,3)", r"\{1,2,3\}"), (r"\left(1,2\right)", r"\left\{1,2\right\}"),
        ("1,2", "1"), ("1", "1,2"), ("5", r"4 \text{ or } 5"), ("5", "4 and 5"), ("5", "4; 5"), ("5", r"4\\5"), ("5", "[1,5]"), ("5", "4 5"), ("45", "4 5"), ("4 5", "45"), ("10", "1 0"), ("1000", "1 0 0 0"), ("21", r"2\ 1"), ("red, blue", "red, green"),
        ("5", r"4 \quad 5"), ("(1,2,3)", "(1,2)"),
    ],
    "words": [
        ("east", "seat"), ("east", "west"), ("no", "on"), ("stop", "pots"), ("listen", r"\text{silent}"), ("True", "False"), ("yes", "no"), (r"\text{no solution}", "0"),
        (r"\emptyset", "0"), ("Evelyn", "Eve"), ("x", "y"), ("n", "m"), ("5", "five apples"), ("acute", "obtuse"), ("abc", "bca"), ("infinite", "0"),
    ],
    "choices": [("A", "B"), ("(A)", "(B)"), ("A", r"\text{C}"), ("A", "(B) 12"), ("12", "(A) 13"), ("E", "2.718281828"), ("A", "AB")],
    "times and dates": [
        ("7:30 AM", "7:30 PM"), ("7:30", "8:30"), ("12:00", "1:00"), ("12:30", "30"), ("7:30 PM", "7:31 PM"), ("2024-01-05", "2024-05-01"),
        ("2024-01-05", "2018"), ("1/2/2024", "2/1/2024"), ("January 5, 2024", "January 6, 2024"), ("March 5", "May 5"), ("2024-01-05", "2024-1-4"), ("2018", "2024-01-05"),
    ],
    "bases": [
        ("10110_2", "10110_3"), ("10110_2", "22"), ("10110_2", "10111_2"), ("12_{8}", "12_{10}"), ("1A_{16}", "1B_{16}"), ("10110₂", "10110₈"),
        (r"1011_{\text{two}}", r"1011_{\text{three}}"), ("22", "10110_2"),
    ],
    "separators": [("1,234", "1235"), ("34", "3,4"), ("1,23", "123"), ("(1,234)", "1234"), ("0,5", "5"), ("12,34", "1234")],
    "ratios": [("1:2:3", "1:1:6"), ("1:2:6", "1:3:4"), ("0:1:2", "0:3:7"), ("3:2", "2:3"), ("3:2", "3"), ("2", "3:2"), ("1:2:3", "3:2:1"), ("1:2:3", "1:6")],
    "formulas": [
        ("x^2+2x+1", "(x+1)^3"), ("1+2i", "1-2i"), (r"\sqrt{2}", "1.4"), ("0", r"\frac{0}{0}"), ("123456789", "123456788"), ("0.0000001", "0.0000002"),
        ("0.1", "0.10000001"), (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\4&3\end{pmatrix}"), ("12345678901234567890", "12345678901234567891"),
        ("5", "4 / 5"), ("1/3", "0.3"),
    ],
}  # fmt: skip
PAIRS = [
    pytest.param(gold, given, score, id=f"{kind}: {gold} | {given}: {score:g}")
    for table, score in ((SAME, 1.0), (OTHER, 0.0))
    for kind, pairs in table.items()
    for gold, given in pairs
]


@pytest.mark.parametrize(("gold", "given", "score"), PAIRS)
def test_boxed_math_tells_the_same_answer_from_another(gold, given, score):
    assert boxed_math(["q"], [f"so \\boxed{{{given}}}"], answer=[gold]) == [score]


# Numbers with and without their thousands separators.
SEPARATED = [
    ("1,234", "1234"), ("1 234", "1234"), ("-1,234", "-1234"), ("12,345,678.9", "12345678.9"), ("100,200,300", "100200300"), ("1,050", "1050"),
    (r"\$1,234", r"\$1234"), ("1,234%", "1234%"), ("x=1,234", "x=1234"), ("9,999.", "9999."), ("1,234, 5,678", "1234, 5678"),
    (r"\frac{1,000}{3,000}", r"\frac{1000}{3000}"), ("2^{1,234}", "2^{1234}"), (r"\sqrt[3]{1,000}", r"\sqrt[3]{1000}"),
    ("1{,}234", "1234"), ("12{,}345{,}678", "12345678"), (r"1\,234\,567", "1234567"), (r"10,\!000", "10000"), (r"10\ 000", "10000"),
    ("10~000", "10000"), ("1\u202f234", "1234"), (r"(1\,234)", "(1234)"), ("(1{,}234)", "(1234)"),
    # Elements are told apart by something else than the bare comma.
    ("(1,234, 5)", "(1234, 5)"), ("[1,234; 5,678)", "[1234; 5678)"), (r"\{1,000, 2,000\}", r"\{1000, 2000\}"),
]  # fmt: skip
OTHER_COMMAS = [
    "3,4", "0,5", "1,23", "1,2345", "1,2,3", "1,234,56", "1234,567", "12,34,567", "0,500", "01,234", "000,000", "1.234,5", "1.234,567",
    ".123,456", "1,234.567,8", "1,234,-5", "1,234.56,-5", "-5,1,234", "1,234,x", "x,1,234", "x_1,234", "x^2,345", "x1,234", "(1,234)",
    "[1,234]", "(1,234]", "{1,234}", r"\{1,234\}", "(12,345,678)", r"\left(1,234\right)", "f(1,234)", "((1,234), 5)", "(1, (2,345))",
    "(1,234", r"1\,23", r"1{,}23", r"1,234\,567", "4 5", "1 23", "12 3456", "", "no number",
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"), [*SEPARATED, *((text, text) for text in OTHER_COMMAS)]
)
def test_thousands_separators_go_and_other_commas_stay(text, expected):
    assert without_thousands_separators(text) == expected


FORMS = ["\\boxed{5}", "\\boxed {5}", "\\boxed\n{5}", "\\boxed 5", "\\fbox{5}", "$\\boxed{5}$", "**\\boxed{5}**", "\\boxed{\\boxed{5}}",
         "\\boxed{x = \\boxed{5}}", "\\boxed{4} no, \\boxed{5}", "\\boxed{5}}", "#### 5", "####5", "#### **5**", "#### $5", "#### 4\nno, #### 5",
         "\\boxed{5} #### 4", "#### 5 apples\n"]  # fmt: skip


@pytest.mark.parametrize("text", FORMS)
def test_the_final_answer_is_found(text):
    assert boxed_math(["q"] * 2, [text] * 2, answer=["5", "4"]) == [1.0, 0.0]


BLANKS = [
    *(
        f"\\a{part * 20_000}"
        for part in ("\\sqrt", "\\sqrt[", "\\frac", "{\\over", "\\color{", "{\\bf ", "^\\frac")
    ),
    "answer is " + " " * 100_000,
    "answer is" + " " * 100_000 + "5",
    "5" + " " * 100_000 + "x",
    "\\boxed{" * 14_000,
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("text", BLANKS, ids=lambda text: text[:9])
def test_long_texts_are_read_in_linear_time(text):
    for given, wanted in (("\\boxed{5}", text), (text, "5"), (f"\\boxed{{{text}}}", "5")):
        boxed_math(["q"], [given], answer=[wanted])
        last_number(["q"], [given], answer=[wanted])
    assert boxed_math(["q"], ["\\boxed{5}"], answer=["the answer is" + " " * 10_000 + "5."]) == [
        1.0
    ]
    assert boxed_math(
        ["q"] * 2, ["\\boxed{" + "1+" * 3000 + "1}"] * 2, answer=["5", "1+" * 3000]
    ) == [0.0, None]


def test_what_the_policy_made_unscorable_is_told_from_what_the_row_did():
    found: list[int] = []
    texts = [f"\\boxed{{{text}}}" for text in ("10^{10^{10}}", "3", "9^{9^9}+1", "5!!!")]
    answers = ["1/2", "10^{10^{10}}", ["1", "2^{2^{99}}"], None]
    assert boxed_math(["q"] * 4, texts, answer=answers, log_unscorable=found.append) == [None] * 4
    assert found == [0]


# The first alarm may come while Python collects garbage, which swallows it with a warning.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_comparison_that_takes_long_is_unscored_and_the_next_one_is_not(monkeypatch):
    monkeypatch.setattr(math_answers, "PROCESSOR_SECONDS", 0.3)
    hard = "\\int_0^1 " + "(x^5+x+1)^{7}\\cdot\\sin(x^3)^{9}" * 4 + "dx"
    texts = [f"\\boxed{{{hard}}}", "\\boxed{\\frac{2}{4}}", "\\boxed{3}"]
    assert boxed_math(["q"] * 3, texts, answer=["\\frac{1}{2}"] * 3) == [None, 1.0, 0.0]
    assert boxed_math(["q"], [texts[0]], answer=[["\\frac{1}{2}", hard]]) == [1.0]


@pytest.mark.parametrize(
    "tower", ["10^{10^{10}}", "9^{9^9}", "2^{123456789}", "10^{-10^{10}}", "99999999!", "5!!!"]
)
def test_numbers_that_no_computer_holds_are_unscored(tower):
    assert boxed_math(["q"] * 2, [f"\\boxed{{{tower}}}"] * 2, answer=["5", tower]) == [None, 1.0]


@pytest.mark.parametrize(
    "power", ["2^{2^3}", "(2^3)^4", "e^{x^{2}}", "x^{2^n}", "2^{10^2}", "7!", "x^3y^{12}"]
)
def test_numbers_of_a_usual_size_are_computed(power):
    scores = boxed_math(["q"] * 2, [f"\\boxed{{{power}+1}}"] * 2, answer=[f"1+{power}", power])
    assert scores == [1.0, 0.0]


def test_time_in_which_the_process_does_not_run_does_not_count(monkeypatch):
    monkeypatch.setattr(math_answers, "PROCESSOR_SECONDS", 0.2)
    parse, verify = math_answers._math_verify()

    def stopped(text: str):
        time.sleep(0.3)
        return parse(text)

    monkeypatch.setattr(math_answers, "_math_verify", lambda: (stopped, verify))
    assert boxed_math(["q"], ["\\boxed{\\frac{2}{4}}"], answer=["\\frac{1}{2}"]) == [1.0]


def test_threads_compare_without_a_limit():
    with ThreadPoolExecutor(1) as threads:
        scoring = threads.submit(boxed_math, ["q"], ["\\boxed{x+x}"], answer=["2x"])
        assert scoring.result(timeout=60) == [1.0]
