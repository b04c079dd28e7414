"""How the tests' own modules find each other: what several share is in support/, which pyproject.toml's `pythonpath` shows."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
TEXTS = {path.relative_to(TESTS).as_posix(): path.read_text() for path in TESTS.rglob("*.py")}
IMPORTS_A_TEST = re.compile(
    r"^\s*(from|import) ([\w.]*\.)?(test_|conftest\b)|^\s*from \S+ import .*\btest_(?!ing)\w+", re.MULTILINE
)
CHANGES_SYS_PATH = re.compile(r"sys\.path(\.(append|extend|insert|remove|pop)\(|(\[.*?\])? \+?= )|site\.addsitedir\(")
# An import of a private module of zbpipe without a comment that says why; a command's is its entry.
PRIVATE = re.compile(
    r"^from zbpipe(\.\w+)*\._(?!cli)[^#\n]*$|^from zbpipe[\w.]* import [^#\n]*\b_\w[^#\n]*$", re.MULTILINE
)


def test_no_module_imports_a_test_module():
    assert len(TEXTS) > 100
    assert [name for name, text in TEXTS.items() if IMPORTS_A_TEST.search(text)] == []
    assert IMPORTS_A_TEST.search("    from tests.test_house import found") and IMPORTS_A_TEST.search(
        "from . import test_x"
    )


def test_one_module_alone_changes_sys_path():
    """Python must meet the sitecustomize of torch_2_11/ before any other: conftest.py says for what."""
    found = [
        name
        for name, text in TEXTS.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.stmt) and CHANGES_SYS_PATH.match(ast.unparse(node))
    ]
    assert found == ["conftest.py"]
    assert CHANGES_SYS_PATH.match("sys.path[:0] = [here]") and CHANGES_SYS_PATH.match("sys.path += [here]")


def test_what_imports_a_private_module_says_why():
    assert [name for name, text in TEXTS.items() if PRIVATE.search(text)] == []
    assert PRIVATE.search("from zbpipe._stage import state") and PRIVATE.search("from zbpipe import _C, leaks")
    assert not PRIVATE.search("from zbpipe import leaks") and not PRIVATE.search("from zbpipe._C import f  # why")


def test_the_shared_package_holds_no_test():
    assert not [name for name, text in TEXTS.items() if name.startswith("support/") and "\ndef test_" in text]
