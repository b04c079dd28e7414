"""One interpreter: another's import of the compiled part is refused, in a sentence. (Once there has been another, torch's
engine refuses every backward of the first: Python then says of every thread that it holds the GIL.)"""

import sys

import pytest
from support.oracle import needs_zbpipe
from support.processes import in_own_process

pytestmark = needs_zbpipe

BODY = """
import os, textwrap
import zbpipe
from zbpipe import _C  # the compiled part, which is imported elsewhere
try:
    import _xxsubinterpreters as interpreters
except ImportError:
    import _interpreters as interpreters

LOAD = f'''
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
module = module_from_spec(spec_from_loader("zbpipe._C", ExtensionFileLoader("zbpipe._C", {_C.__file__!r})))
module.__loader__.exec_module(module)
'''


def refusal(**options):
    interpreter = interpreters.create(**options)
    said = f"try:\\n{textwrap.indent(LOAD, '    ')}\\nexcept ImportError as refusal:\\n    import os\\n    os.write({w}, str(refusal).encode())"
    interpreters.run_string(interpreter, said)
    interpreters.destroy(interpreter)
    return os.read(r, 1000).decode()


r, w = os.pipe()
os.set_blocking(r, False)
sentence = "zbpipe._C cannot be loaded into a sub-interpreter: torch has one interpreter"
if sys.version_info >= (3, 12):
    assert "zbpipe._C does not support loading in subinterpreters" in refusal()
    assert sentence in refusal(isolated=False)
else:
    assert sentence in refusal()
    assert sentence in refusal(isolated=False)
"""


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="asks for interpreters as earlier Pythons name them")
def test_a_sub_interpreter_is_refused():
    in_own_process(BODY)


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="asks for interpreters as earlier Pythons name them")
def test_a_module_that_is_not_refused_is_seen():
    with pytest.raises(AssertionError, match="Blocking"):
        in_own_process(BODY.replace('"zbpipe._C"', '"_json"').replace("_C.__file__", "sys.modules['_json'].__file__"))
