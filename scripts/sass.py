#!/usr/bin/env python3
"""Reads what the compiler made of the CUDA kernels in a program or library, and checks it against claims.

  scripts/sass.py list build/apps/delta-attention     registers, stack, shared memory and threads of every kernel
  scripts/sass.py check build/apps/delta-attention    every check of scripts/sass_claims.py; no GPU needed

Exit codes: 0 all checks hold, 1 a check does not hold, 77 nothing could be checked here (the reason is printed).
Needs cuobjdump and nvdisasm: from the CUDA toolkit, or from PyPI (nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm; scripts/setup
puts them into .venv).
"""

import argparse
import collections
import functools
import json
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

from sass_claims import CLAIMS

ROOT = Path(__file__).resolve().parents[1]
SKIPPED = 77


class Unavailable(Exception):
    """Nothing can be checked here, and why."""


@functools.cache
def find_tool(name):
    """The path of a binary utility: on the PATH, in the toolkit, or in a Python environment (the project's, or this one's)."""
    for path in (None, "/usr/local/cuda/bin"):
        if found := shutil.which(name, path=path):
            return found
    packages = [Path(p) for p in sys.path if p.endswith("site-packages")]
    packages += sorted(ROOT.glob(".venv/lib/python3*/site-packages"))
    for package in packages:
        for found in sorted(package.glob(f"nvidia/*/bin/{name}")):
            return str(found)
    raise Unavailable(f"{name} was found neither in a CUDA toolkit nor in .venv (pip install nvidia-cuda-{name})")


def run(command, folder=None):
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", cwd=folder)
    if done.returncode != 0:
        raise Unavailable(f"{Path(command[0]).name} failed: {done.stderr.strip()[-300:]}")
    return done.stdout


# ------------------------------------------------------------------------------------------------------------- kernels

# The numbers that stand for enumerators in a template's arguments.
ENUMERATORS = {"Update": ["additive", "delta"], "Gate": ["none", "scalar", "channel"],
               "Layout": ["row_major", "striped", "vectors"], "Loads": ["async_copies", "registers"]}


def short_name(demangled):
    """chunk_pipeline<Policy<delta, channel, PlainSum, 128, 16>>: without namespaces, return type and parameters."""
    name = demangled.replace("(anonymous namespace)::", "")
    name = re.sub(r"\((?:\w+::)*(\w+)\)(\d+)",
                  lambda m: ENUMERATORS[m[1]][int(m[2])] if m[1] in ENUMERATORS else m[2], name)
    name = re.sub(r"\b\w+::", "", name).replace("> >", ">>")
    name = re.sub(r"^[\w ]+ (?=\w+[<(])", "", name)
    depth = 0
    for at, character in enumerate(name):
        depth += {"<": 1, ">": -1}.get(character, 0)
        if character == "(" and depth == 0:
            return name[:at]
    return name


def demangle(names):
    tool = shutil.which("c++filt") or shutil.which("cu++filt", path="/usr/local/cuda/bin")
    if not tool:
        raise Unavailable("c++filt (binutils) is not here to tell the kernels' names")
    done = subprocess.run([tool], input="\n".join(names), capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


RESOURCE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


def parse_resources(text):
    """[(architecture, mangled name, {registers, stack, shared, local})] of `cuobjdump --dump-resource-usage`."""
    kernels, architecture, function = [], "", ""
    for line in text.splitlines():
        if line.startswith("arch = "):
            architecture = line[len("arch = "):].strip()
        elif line.startswith(" Function "):
            function = line[len(" Function "):].rstrip(":")
        elif found := RESOURCE.search(line):
            numbers = dict(zip(("registers", "stack", "shared", "local"), map(int, found.groups())))
            kernels.append((architecture, function, numbers))
    return kernels


class Cubin:
    """One architecture's machine code of one source file: what the ELF file says of its functions."""

    MAX_THREADS = 0x05  # EIATTR_MAX_THREADS: the launch bound, three numbers
    SIZED = 0x04        # EIFMT_SVAL: a record with a length; the others are four bytes long

    def __init__(self, path):
        self.path = path
        data = path.read_bytes()
        section_offset, = struct.unpack_from("<Q", data, 40)
        size, count, names_index = struct.unpack_from("<HHH", data, 58)
        sections = [struct.unpack_from("<IIQQQQIIQQ", data, section_offset + i * size) for i in range(count)]
        names = sections[names_index][4]
        self.symbols = {}  # mangled name -> index in the symbol table
        self.threads = {}  # mangled name -> launch bound
        for section in sections:
            name = self._text(data, names + section[0])
            if name == ".symtab":
                self._read_symbols(data, section, sections[section[6]][4])
            elif name.startswith(".nv.info."):
                self._read_attributes(data, section, name[len(".nv.info."):])

    @staticmethod
    def _text(data, at):
        return data[at:data.index(b"\0", at)].decode()

    def _read_symbols(self, data, section, strings):
        for index in range(section[5] // 24):
            at, kind = struct.unpack_from("<IB", data, section[4] + index * 24)
            if kind & 0xF == 2:  # STT_FUNC
                self.symbols[self._text(data, strings + at)] = index

    def _read_attributes(self, data, section, function):
        at, end = section[4], section[4] + section[5]
        while at < end:
            form, attribute, size = struct.unpack_from("<BBH", data, at)
            if form == self.SIZED and attribute == self.MAX_THREADS:
                x, y, z = struct.unpack_from("<III", data, at + 4)
                self.threads[function] = x * y * z
            at += 4 + (size if form == self.SIZED else 0)

    def disassemble(self, mangled):
        """The instructions of one function, with the lines of source that they come from."""
        command = [find_tool("nvdisasm"), "-c", "-gi", "-fun", str(self.symbols[mangled]), str(self.path)]
        return parse_instructions(run(command))


class Kernel:
    def __init__(self, architecture, mangled, name, numbers, cubin):
        self.architecture, self.mangled, self.name, self.cubin = architecture, mangled, name, cubin
        self.registers, self.stack = numbers["registers"], numbers["stack"]
        self.shared, self.local = numbers["shared"], numbers["local"]
        self.threads = cubin.threads.get(mangled)

    @functools.cached_property
    def instructions(self):
        return self.cubin.disassemble(self.mangled)

    def summary(self):
        return {"kernel": self.name, "architecture": self.architecture, "registers": self.registers,
                "stack": self.stack, "local": self.local, "shared": self.shared, "threads": self.threads}

    def __str__(self):
        return f"{self.name} ({self.architecture})"


def read_kernels(binary, folder):
    """Every kernel of a program, library or object file, for every architecture in it; `folder` keeps the machine code."""
    cuobjdump, binary = find_tool("cuobjdump"), Path(binary).resolve()
    if not binary.exists():
        raise Unavailable(f"{binary}: no such file")
    listing = run([cuobjdump, "--dump-resource-usage", str(binary)])
    found = parse_resources(listing)
    if not found:
        raise Unavailable(f"{binary.name} holds no machine code for a GPU")
    run([cuobjdump, "--extract-elf", "all", str(binary)], folder)
    cubins = {}
    for path in sorted(Path(folder).glob("*.cubin")):
        cubin = Cubin(path)
        for mangled in cubin.symbols:
            cubins[architecture_of(path), mangled] = cubin
    names = [short_name(name) for name in demangle([mangled for _, mangled, _ in found])]
    return [Kernel(architecture, mangled, name, numbers, cubins[architecture, mangled])
            for (architecture, mangled, numbers), name in zip(found, names)]


def architecture_of(path):
    """sm_90a of step_loop.sm_90a.cubin or step_loop.2.sm_90a.cubin."""
    return path.name.split(".")[-2]


# -------------------------------------------------------------------------------------------------------- instructions

Instruction = collections.namedtuple("Instruction", "address opcode operands target source")
Line = collections.namedtuple("Line", "file number")

SOURCE_LINE = re.compile(r'//## File "([^"]*)", line (\d+)')
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")
LABEL = re.compile(r"^(\.L\w+):")
BRANCH_TARGET = re.compile(r"`\((\.L\w+)\)")


def parse_instructions(text):
    """Instructions of nvdisasm's listing of one function. `source` is the innermost line, then the lines it is inlined into."""
    instructions, labels, waiting, source, fresh = [], {}, [], (), True
    for line in text.splitlines():
        if found := SOURCE_LINE.search(line):
            source = (() if fresh else source) + (Line(found[1], int(found[2])),)
            fresh = False
        elif found := LABEL.match(line):
            waiting.append(found[1])
        elif found := INSTRUCTION.search(line):
            address = int(found[1], 16)
            for label in waiting:
                labels[label] = address
            waiting, fresh = [], True
            target = BRANCH_TARGET.search(found[3]) if found[2].startswith("BRA") else None
            instructions.append(Instruction(address, found[2], found[3].strip(), target and target[1], source))
    return [i._replace(target=labels.get(i.target)) for i in instructions]


def count(instructions, pattern):
    """Instructions whose opcode is `pattern` (a regular expression that ends at a dot or at the opcode's end)."""
    opcode = re.compile(rf"(?:{pattern})(?:\.|$)")
    return sum(bool(opcode.match(i.opcode)) for i in instructions)


def loops_with(instructions, pattern):
    """The innermost loops with an instruction of this opcode: what a backward branch repeats, with no smaller such loop inside. A
    branch back over the end of the function comes from code that was put out of line, and repeats nothing."""
    spans = {(i.target, i.address) for i in instructions if i.target is not None and i.target < i.address}
    loops = {(a, b): [i for i in instructions if a <= i.address <= b] for a, b in spans}
    having = sorted(span for span in spans if count(loops[span], pattern) and not count(loops[span], "EXIT"))
    return [loops[a, b] for a, b in having if not any((c, d) != (a, b) and a <= c and d <= b for c, d in having)]


# -------------------------------------------------------------------------------------------------------------- checks

REGISTER_FILE = 64 * 1024  # 32-bit registers of a multiprocessor, compute capability 8.0 to 12.0


class Report:
    def __init__(self):
        self.checks = []

    def add(self, check, subject, passed, found):
        self.checks.append({"check": check, "subject": subject, "passed": bool(passed), "found": found})

    @property
    def breaches(self):
        return [c for c in self.checks if not c["passed"]]


def check_resources(kernels, claims, report):
    """No kernel spills or has a stack, and as many blocks as claimed find their registers on a multiprocessor."""
    for kernel in kernels:
        report.add("no spills, no stack", str(kernel), kernel.stack == 0 and kernel.local == 0,
                   f"stack {kernel.stack}, local {kernel.local} bytes")
        report.add("has a launch bound", str(kernel), kernel.threads, f"{kernel.threads} threads")
        blocks = max([c["blocks"] for c in claims if re.search(c["kernel"], kernel.name)], default=1)
        registers = -(-kernel.registers // 8) * 8 * (kernel.threads or 0) * blocks
        report.add(f"registers of {blocks} block{'s' * (blocks > 1)} fit a multiprocessor", str(kernel),
                   registers <= REGISTER_FILE, f"{kernel.registers} registers x {kernel.threads} threads x {blocks}")


def select(kernels, claim, report, what):
    """The kernels that a claim is about; a claim about no kernel is a breach, so that a renamed kernel is not lost."""
    found = [k for k in kernels if re.search(claim["kernel"], k.name)]
    if not found:
        report.add(what, claim["kernel"], False, "no kernel has this name")
    return found


def check_wide_accesses(kernels, claims, report):
    """A kernel has at least so many instructions of the claimed width."""
    for claim in claims:
        what = f"at least {claim['at_least']} {claim['instruction']}"
        for kernel in select(kernels, claim, report, what):
            found = count(kernel.instructions, claim["instruction"])
            report.add(what, str(kernel), found >= claim["at_least"], f"{found}")


MULTIPLIES = re.compile(r"U?(?:IMAD|IMUL)(?!\.(?:MOV|IADD|SHL|X)\b)")
INTEGER_DIVISION = r"I2F(?:\.F64)?\.U\d+\.RP"  # how every integer division begins, inline or called


def is_multiplication(instruction):
    """IMAD also serves as move and as addition: with a zero among the factors, or under a name that says so."""
    factors = [o.strip() for o in instruction.operands.split(",")][1:3]
    return bool(MULTIPLIES.match(instruction.opcode)) and not {"RZ", "URZ"} & set(factors)


def check_token_loops(kernels, claims, report):
    """Loops that touch global memory spend few integer multiplications, and no division, on an access."""
    for claim in claims:
        what = (f"loops with {claim['access']}: at most {claim['multiplications']} multiplications an access, "
                "no integer division")
        for kernel in select(kernels, claim, report, what):
            loops = loops_with(kernel.instructions, claim["access"])
            worst = max((sum(map(is_multiplication, l)) / count(l, claim["access"]) for l in loops), default=0.0)
            divisions = sum(count(l, INTEGER_DIVISION) for l in loops)
            report.add(what, str(kernel), loops and worst <= claim["multiplications"] and not divisions,
                       f"{len(loops)} loops, at most {worst:.2f} multiplications an access, {divisions} divisions")


def check_rounded(kernels, claims, report):
    """What each rounded operation of a header was compiled to: that operation, merged with no other."""
    for claim in claims:
        lines = function_lines(claim["file"], claim["operations"])
        for kernel in select(kernels, claim, report, "rounded operations are not contracted"):
            compiled = {function: collections.Counter() for function in claim["operations"]}
            for instruction in kernel.instructions:
                opcode, function = instruction.opcode.split(".")[0], innermost_function(instruction, claim["file"], lines)
                if function and opcode in ("FADD", "FMUL", "FFMA"):
                    compiled[function][opcode] += 1
            for function, allowed in claim["operations"].items():
                found = compiled[function]
                report.add(f"{function} compiles to {allowed} alone", str(kernel), set(found) == {allowed},
                           ", ".join(f"{n} {op}" for op, n in sorted(found.items())) or "nothing")


def innermost_function(instruction, file, lines):
    """The function of `file` that the instruction itself comes from, whatever that is inlined into."""
    source = instruction.source
    return lines.get(source[0].number) if source and source[0].file.endswith(file) else None


def function_lines(file, functions):
    """line number -> function, for functions `float name(...) {` that end at a line `}`."""
    names, current = {}, None
    for number, line in enumerate((ROOT / file).read_text().splitlines(), 1):
        for function in functions:
            if re.search(rf"float {function}\(", line):
                current = function
        if current:
            names[number] = current
        if line == "}":
            current = None
    return names


def check_counts(kernels, claims, report):
    """A kernel made of one operation has exactly the floating-point instructions that the operation is written with."""
    for claim in claims:
        what = "exactly " + ", ".join(f"{n} {op}" for op, n in claim["exactly"].items())
        for kernel in select(kernels, claim, report, what):
            found = {op: count(kernel.instructions, op) for op in claim["exactly"]}
            report.add(what, str(kernel), found == claim["exactly"], ", ".join(f"{n} {op}" for op, n in found.items()))


def check(binary, claims):
    """Every claim of a table (see sass_claims.py) against a binary."""
    report = Report()
    with tempfile.TemporaryDirectory() as folder:
        kernels = read_kernels(binary, folder)
        check_resources(kernels, claims.get("blocks", []), report)
        check_wide_accesses(kernels, claims.get("wide_accesses", []), report)
        check_token_loops(kernels, claims.get("token_loops", []), report)
        check_rounded(kernels, claims.get("rounded", []), report)
        check_counts(kernels, claims.get("counts", []), report)
        return [k.summary() for k in kernels], report


def print_kernels(kernels):
    print(f"{'registers':>9} {'stack':>6} {'shared':>7} {'threads':>8}  kernel")
    for k in kernels:
        print(f"{k['registers']:>9} {k['stack']:>6} {k['shared']:>7} {k['threads'] or '-':>8}  {k['kernel']} "
              f"({k['architecture']})")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["list", "check"])
    parser.add_argument("binary", type=Path, help="program, library or object file with CUDA kernels")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the outcome there")
    arguments = parser.parse_args()
    try:
        if arguments.command == "list":
            with tempfile.TemporaryDirectory() as folder:
                kernels, report = [k.summary() for k in read_kernels(arguments.binary, folder)], Report()
            print_kernels(kernels)
        else:
            kernels, report = check(arguments.binary, CLAIMS)
            print(f"Machine code: {len(kernels)} kernels, {len(report.checks)} checks, {len(report.breaches)} do not hold")
            for c in report.breaches:
                print(f"  {c['subject']}: {c['check']}: {c['found']}")
        outcome, status = {"kernels": kernels, "checks": report.checks}, 1 if report.breaches else 0
    except Unavailable as reason:
        print(f"Machine code: skipped: {reason}")
        outcome, status = {"skipped": str(reason)}, SKIPPED
    if arguments.json:
        arguments.json.write_text(json.dumps(outcome, indent=1) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
