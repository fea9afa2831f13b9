import pytest

from specdec.engine.requests.sampling_resolver import MAX_CHARS, preset_for

CODE = [
    "Complete this:\n```python\nx = 1\n```",
    "def has_close_elements(numbers: List[float]) -> bool:\n    '''Check'''",
    "Fix it.\n    async def run(self):\n",
    "class Stack:\n    pass",
    "class Stack(Base, Other):",
    "from typing import List",
    "Look:\nimport numpy as np\n",
    "#include <stdio.h>",
    "const total = 3",
    "fn main() -> i32 {",
    "for (int i = 0; i < n; i++) {",
    "printf(x);",
    "SELECT;\nfunc add(a int, b int) int",
]
PROSE = [
    "",
    "Write a story about a river that freezes in March.",
    "import duties rose; from then on imports fell",
    "Let us define a class of functions. In class, we\nimport values from home.",
    "Natalia sold clips to 48 of her friends (in April); then half as many in May.",
    "The class: a place to learn.",
    "He asked (quietly):\nwhat now?",
]


@pytest.mark.parametrize("prompt", CODE)
def test_code_is_strict(prompt):
    assert preset_for(prompt, is_structured=False) == "strict"


@pytest.mark.parametrize("prompt", PROSE)
def test_other_text_is_lenient(prompt):
    assert preset_for(prompt, is_structured=False) == "lenient"


@pytest.mark.parametrize("prompt", [CODE[0], PROSE[1]])
def test_structured_output_is_medium_for_any_prompt(prompt):
    assert preset_for(prompt, is_structured=True) == "medium"


def test_only_the_end_of_a_prompt_is_searched_in_linear_time():
    assert preset_for(CODE[0] + " " * MAX_CHARS, is_structured=False) == "lenient"
    for hostile in ("\n \t" * 10_000, "class a" * 10_000, "import a." + "a." * 10_000, "(" * 9999):
        assert preset_for(hostile, is_structured=False) == "lenient"
