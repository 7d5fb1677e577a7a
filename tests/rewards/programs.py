"""Programs for the reward `code`: some that try to be rewarded without passing a test, and right ones."""

TESTS = ["assert f(1) == 2", "assert abs(f(1) - 2.5) < 1e-6", "assert 2 in [f(1)]", "assert not f(1) != 2"]
TESTS += ["assert f(1).startswith('2')", "assert {3} <= f({3})", "assert 3 in f(1)"]
"""Tests that CHEATS do not pass. A program that succeeds in what it tries returns 2."""

CHEATS = {
    "writes to all open files": """
import os
for n in range(3, 256):
    try: os.write(n, b"+" * 50)
    except OSError: pass
""",
    "changes the callers' variables": """
import sys
frame = sys._getframe()
while frame:
    for value in list(frame.f_locals.values()):
        if isinstance(value, dict) and "tests" in value: value["tests"][:] = ["pass"]
    frame = frame.f_back
""",
    "is equal to everything": """
class A:
    __eq__ = __contains__ = __lt__ = __call__ = lambda *others: True
    __sub__ = __rsub__ = __abs__ = lambda *others: 0
    __le__ = __ge__ = startswith = lambda *others: True
f = lambda n: A()
""",
    "is an equal number": """
class A(int):
    __eq__ = lambda *others: True
    __ne__ = lambda *others: False
    __sub__ = __rsub__ = lambda *others: 0
f = lambda n: A(9)
""",
    "replaces builtins": """
import builtins
class A(int): __eq__ = lambda *others: True
builtins.exec = builtins.compile = builtins.abs = lambda *a, **k: 0
builtins.int = A
builtins.AssertionError = type(None)
__builtins__ = {}
""",
    "replaces names of tests": "def abs(n): return 0\ndef isinstance(*a): return True\n__builtins__ = {'abs': abs}",
    "traces": """
import sys, threading
tracer = lambda frame, *others: frame.f_globals.update(f=lambda n: 2) or tracer
tracer.__globals__.pop("f")
sys.settrace(lambda *a: None)
threading.settrace(lambda *a: None)
""",
    "exits": "import sys; sys.exit(0)",
    "exits at once": "import os; os._exit(0)",
    "exits in the call": "import os\ndef f(n): os._exit(0)",
    "writes at the end": "import atexit, os\natexit.register(lambda: os.write(1, b'+++'))",
    "searches all objects": """
import gc
for value in gc.get_objects():
    if isinstance(value, dict) and "tests" in value: value["tests"] = ["1"]
    if isinstance(value, list) and any(isinstance(x, str) and x[:8] == "assert f" for x in value): value[:] = ["1"]
""",
    "finds the tests in memory": r"""
import re
def f(n):
    for line in open("/proc/self/maps"):
        start, end = (int(x, 16) for x in line.split()[0].split("-"))
        try:
            with open("/proc/self/mem", "rb", 0) as memory:
                memory.seek(start)
                if re.search(rb"assert f\(1\) == \d", memory.read(end - start)): return 2
        except (OSError, ValueError, OverflowError): pass
""",
    "writes to open files of others": """
import glob, os
def f(n):
    for name in glob.glob("/proc/[0-9]*/fd/[0-9]*"):
        if name.split("/")[2] != str(os.getpid()):
            try:
                os.write(os.open(name, os.O_WRONLY | os.O_NONBLOCK), b"")
                return 2
            except OSError: pass
""",
    "reads files of others": """
import os, pathlib
f = lambda n: 2 if os.listdir("/root") or os.listdir("/home") or os.listdir("/tmp") else 0
""",
    "replaces functions of its process": """
import __main__, sys
link = sys.modules["swiftlite.rewards.code_link"]
for module in (__main__, link):
    for name in list(vars(module)):
        if name[0] != "_" and callable(vars(module)[name]) : setattr(module, name, lambda *a, **k: True)
""",
    "answers before it is asked": """
import os
for n in range(200):
    try: os.write(3, b'{"result": 3, "changed": [], "output": "+"}\\n')
    except OSError: break
""",
    "sends what is not a message": "import os\nf = lambda n: os.write(3, b'[' * 100000 + b'\\n')",
    "calls functions of the judge": """
import os
call = b'{"call": ["builtin", "%s"], "args": ["list", "print(1)"], "kwargs": ["dict"]}\\n'
f = lambda n: [os.write(3, call % name) for name in (b"eval", b"exec", b"type")]
""",
    "claims to have changed an argument": """
import os
f = lambda n: os.write(3, b'{"result": 1, "changed": [[0, 2]], "output": ""}\\n')
""",
    "closes its files": "import os\nos.closerange(0, 256)",
    "kills its parent": "import os\nos.kill(os.getppid(), 9)\nf = lambda n: 2",
    "sends a signal to its grandparent": """
import os
os.kill(int(open(f"/proc/{os.getppid()}/stat").read().rpartition(")")[2].split()[1]), 0)
f = lambda n: 2
""",
    "stops its parent": "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)\nf = lambda n: 2",
    "kills its group": "import os\nos.killpg(0, 9)",
    "traces its parent": """
import ctypes, os
assert ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0
f = lambda n: 2
""",
    "writes to the memory of its parent": "import os\nopen(f'/proc/{os.getppid()}/mem', 'rb+')\nf = lambda n: 2",
    "becomes root": "import os\nos.setuid(0)\nopen('/etc/passwd', 'a')\nf = lambda n: 2",
    "reads secrets of the system": "f = lambda n: 2 if open('/etc/shadow').read() else 0",
    "forks": "import os\nos.fork()\nos.fork()\nf = lambda n: os.getpid()",
    "forks without end": "import os\nwhile True: os.fork()",
    "never returns": "def f(n):\n    while True: pass",
    "writes without end": "def f(n):\n    while True: print('+' * 100000, flush=True)",
    "allocates without end": "def f(n):\n    x = [0]\n    while True: x = x + x",
    "returns a large value": "f = lambda n: '+' * 10**9",
    "returns a deep value": "def f(n):\n    x = []\n    for _ in range(10**5): x = [x]\n    return x",
    "returns itself": "def f(n):\n    x = []\n    x.append(x)\n    return x",
    "returns a large number": "f = lambda n: 10 ** 10 ** 6",
    "writes a startup file": """
import pathlib, sys
for path in sys.path:
    try: pathlib.Path(path, "swiftlite_cheat.py").write_text("x = 1")
    except OSError: continue
    f = lambda n: 2
""",
    "is a module": "import math as f",
}

CHEATS_OF_TESTS = {
    "ends where an exception is expected": (
        "import os\ndef f(n): os._exit(0)",
        ["try: f(1)\nexcept BaseException: pass", "import pytest\nwith pytest.raises(Exception): f(1)"],
    ),
    "answers for modules that the tests use": (
        """
class math: isclose = allclose = staticmethod(lambda *others: True)
np = math()
f = lambda n: 0
""",
        ["assert math.isclose(f(1), 2)", "assert np.allclose(f(1), 2)"],
    ),
    "looks like an array": (
        """
class A:
    __array__ = lambda *others, **named: __import__("numpy").array([2])
    __len__ = lambda self: 1
    __getitem__ = lambda self, index: [2][index]
    __getattr__ = lambda self, name: lambda *others: True
f = lambda n: A()
""",
        [
            "import numpy as np\nassert np.allclose(f(1), 2.5)",
            "import math\nassert math.isclose(f(1), 2.5)",
            "import pytest\nassert f(1) == pytest.approx(2.5)",
            "import unittest\nunittest.TestCase().assertAlmostEqual(f(1), 2.5)",
            "assert f(1) in {2, 3} or {'a': f(1)} == {'a': 2}",
            "assert f(1).issubset({2}) or f(1).isdigit()",
        ],
    ),
}
"""Programs, and tests that they would pass in one process."""

NEEDS_LANDLOCK = {
    "reads files of others",
    "reads secrets of the system",
    "sends a signal to its grandparent",
    "stops its parent",
    "writes a startup file",
}
"""Programs that succeed with the permissions of the user."""

RIGHT = {
    "returns data": (
        "from collections import *\nfrom fractions import Fraction as R\ng = lambda *a: a\ninf = float('inf')\n"
        "point = lambda x, y: namedtuple('P', 'x y')(x, y)",
        [
            "assert g(1, 2.5, 'a\\ud83d', None, True, b'\\xff') == (1, 2.5, 'a\\ud83d', None, True, b'\\xff')",
            "assert g({1: [2]}, {3}, 10**5000)[0][1][0] == 2",
            "assert type(g(1)[0]) is int and isinstance(g(True)[0], bool) and g(float)[0] is float",
            "import decimal; assert g(decimal.Decimal('0.1'), 1j) == (decimal.Decimal('0.1'), 1j)",
            "assert g(range(3), inf) == (range(3), float('inf'))",
            "p = point(1, [2]); assert (p.x, p.y, p[0], p) == (1, [2], 1, (1, [2]))",
        ],
    ),
    "returns numpy": (
        "import numpy as np\ndef f(x): return np.array(x) * 2.0",
        ["assert np.allclose(f([1, 2]), [2, 4])", "assert f([1, 2]).shape == (2,)", "assert f(3) == 6"],
    ),
    "uses modules of the program": (
        "import math\nf = lambda: math.pi",
        ["assert math.isclose(f(), 3.14159265, rel_tol=1e-6)"],
    ),
    "has the name of a module": ("def select(n): return n", ["assert select(1) == 1"]),
    "raises": (
        "class Mine(ValueError): pass\ndef f(n):\n    if n: raise Mine('no', n)\n    raise KeyError('k')",
        [
            "try:\n    f(1)\nexcept Mine as error:\n    assert error.args == ('no', 1)\nelse:\n    assert False",
            "try:\n    f(0)\n    assert False\nexcept KeyError:\n    pass",
            "import pytest\nwith pytest.raises(ValueError, match='no'):\n    f(2)",
        ],
    ),
    "changes arguments": (
        "def sort(x): x.sort()\ndef put(d, key): d[key] = {1}",
        ["x = [3, 1]\nsort(x)\nassert x == [1, 3]", "d = {}\nput(d, key='a')\nassert d == {'a': {1}}"],
    ),
    "has classes": (
        """
from dataclasses import dataclass
@dataclass
class Point:
    x: int
    y: int = 0
    def __add__(self, other): return Point(self.x + other.x, self.y + other.y)
class Stack:
    def __init__(self): self.items = []
    def push(self, item): self.items.append(item); return self
    def __len__(self): return len(self.items)
    def __getitem__(self, n): return self.items[n]
    def __enter__(self): return self
    def __exit__(self, *error): self.items.clear()
class Solution:
    def twoSum(self, nums, target): return [0, len(nums) - 1]
""",
        [
            "assert Solution().twoSum(nums=[2, 7], target=9) == [0, 1]",
            "assert Point(1) + Point(2, y=3) == Point(3, 3) and Point(1) != Point(2)",
            "p = Point(1); p.y = 5; assert (p.x, p.y) == (1, 5) and str(p) == 'Point(x=1, y=5)'",
            "s = Stack(); assert not s; s.push('a').push('b'); assert s[0] == 'a' and list(s) == ['a', 'b']",
            "assert isinstance(Point(1), Point) and not isinstance(3, Point) and 'a' in s and hasattr(s, 'push')",
            "with Stack() as t:\n    t.push(1)\nassert len(t) == 0",
            "candidate = Solution().twoSum\nassert candidate([1, 2], 3) == [0, 1]",
        ],
    ),
    "yields": (
        "def f(n):\n    for i in range(n): yield i",
        ["assert list(f(3)) == [0, 1, 2]", "assert sum(map(int, f(3))) == 3"],
    ),
    "takes functions": (
        "def apply(g, x): return g(x)\ndef count():\n    global n\n    n += 1\nn = 0",
        [
            "assert apply(lambda x: x + 1, 2) == 3 and apply(len, 'abc') == 3",
            "y = 5\ndef g(x): return x * y\nassert apply(g, 2) == 10",
            "assert apply(lambda x: lambda: x, 2)() == 2",
            "count(); count()",
            "assert n == 2",
        ],
    ),
    "is asynchronous": ("async def f(n): return n", ["import asyncio\nassert asyncio.run(f(1)) == 1"]),
    "prints": (
        "def f(): print('hello')",
        [
            "import io, contextlib\nout = io.StringIO()\n"
            "with contextlib.redirect_stdout(out): f()\nassert out.getvalue() == 'hello\\n'"
        ],
    ),
    "has a check": (
        "def f(n): return n + 1",
        ["def check(c):\n    assert c(1) == 2\n    assert c(2) == 3\ncheck(f)", "check(f)"],
    ),
    "reads and writes files": (
        "import tempfile\ndef f():\n    with tempfile.NamedTemporaryFile('w') as x: x.write('a')\n"
        "    return open('y').read()",
        ["open('y', 'w').write('b')\nassert f() == 'b'"],
    ),
    "starts processes": (
        "import concurrent.futures, subprocess, sys\n"
        "def f(n):\n    with concurrent.futures.ThreadPoolExecutor(8) as pool: return sum(pool.map(abs, range(n)))\n"
        "g = lambda: subprocess.run([sys.executable, '-c', 'print(1)'], capture_output=True, text=True).stdout",
        ["assert f(100) == 4950", "assert g() == '1\\n'"],
    ),
}
"""Programs and tests that they pass."""
