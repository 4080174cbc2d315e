"""Generators write what the multislot parser reads, and their errors are Paddle's."""

import io
import re
import subprocess
import sys

import numpy as np
import pytest

import hpcdist.fleet as fleet
import hpcdist.fleet.data_generator as data_generator
from hpcdist.data.multislot import Multislot
from hpcdist.data.slots import slots_of


class Words(fleet.MultiSlotDataGenerator):
    def generate_sample(self, line):
        def samples():
            if line is None:
                yield from ([("w", [i, -i]), ("y", [i / 7])] for i in range(5))
            elif line.strip():
                yield [("w", [len(word) for word in line.split()]), ("y", [1.5])]
            else:
                yield None

        return samples


class Texts(fleet.MultiSlotStringDataGenerator):
    def generate_sample(self, line):
        return lambda: [(("w", line.split()), ("y", ["1"]))]


def run(generator, text, monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    monkeypatch.setattr(sys, "stdout", out)
    generator.run_from_stdin() if text is not None else generator.run_from_memory()
    return out.getvalue()


def test_lines_become_multislot_text(monkeypatch):
    assert run(Words(), "to be\n\nornot\n", monkeypatch) == "2 2 2 1 1.5\n1 5 1 1.5\n"
    assert run(Texts(), "08 1926\n7\n", monkeypatch) == "2 08 1926 1 1\n1 7 1 1\n"


def test_samples_of_memory_are_what_the_parser_reads(monkeypatch):
    text = run(Words(), None, monkeypatch)
    rows, malformed = Multislot(slots_of([("w", "int64", (2,)), ("y", "float64", ())])).parse(
        text.encode()
    )
    assert malformed == []
    assert rows["w"].values.tolist() == [[i, -i] for i in range(5)]
    assert rows["y"].values.tolist() == [i / 7 for i in range(5)]


def test_batches_have_as_many_samples_as_were_set(monkeypatch):
    sizes = []

    class Batched(Words):
        def generate_batch(self, samples):
            sizes.append(len(samples))
            return lambda: samples[:1]

    generator = Batched()
    generator.set_batch(2)
    text = run(generator, "a\nb\nc\nd\ne\n", monkeypatch)
    assert (sizes, text.count("\n")) == ([2, 2, 1], 3)


def test_no_more_lines_are_read_than_the_limit(monkeypatch):
    generator = Words()
    generator._set_line_limit(2)
    assert run(generator, "a\nb\nc\n", monkeypatch).count("\n") == 2


def test_numbers_of_numpy_are_numbers(monkeypatch):
    generator = fleet.MultiSlotDataGenerator()
    sample = [("w", [np.int64(3), True]), ("y", [np.float32(0.5), float("nan")])]
    assert generator._gen_str(sample) == "2 3 1 2 0.5 nan\n"
    assert generator._gen_str(zip(["w", "y"], [[1], [2.0]], strict=True)) == "1 1 1 2.0\n"
    assert generator._proto_info == [("w", "uint64"), ("y", "float")]


@pytest.mark.parametrize(
    ("sample", "told"),
    [
        (5, "the output of process() must be in list or tuple type"),
        ([(5, [1])], "name<class 'int'> must be in str type"),
        ([("w", (1,))], "elements<class 'tuple'> must be in list type"),
        ([("w", [])], "the elements of each field can not be empty, you need padding it"),
        ([("w", ["1"])], "the type of element<class 'str'> must be in int or float"),
        ([("w", [1]), ("y", [1])], "the complete field set of two given line are inconsistent."),
        ([("x", [1])], "the field name of two given line are not match: require<w>, get<x>."),
    ],
)
def test_samples_that_are_none_are_refused_as_by_paddle(sample, told):
    generator = fleet.MultiSlotDataGenerator()
    generator._gen_str([("w", [1])])
    with pytest.raises(ValueError, match=re.escape(told)):
        generator._gen_str(sample)


def test_what_users_must_write_is_told():
    with pytest.raises(NotImplementedError, match=r"define generate_sample\(self, line\)"):
        fleet.MultiSlotDataGenerator().generate_sample("a")
    with pytest.raises(NotImplementedError, match="derive it from MultiSlotDataGenerator or"):
        data_generator.DataGenerator()._gen_str([])
    with pytest.raises(ValueError, match="batch_size must be an integer of at least 1, got 0"):
        Words().set_batch(0)

    class Wrong(fleet.MultiSlotDataGenerator):
        def generate_sample(self, line):
            return [("w", [1])]

    with pytest.raises(ValueError, match="generate_sample must return a function"):
        Wrong().run_from_memory()


def test_a_program_of_a_generator_is_a_command_of_a_pipe(tmp_path):
    program = tmp_path / "words.py"
    program.write_text(
        "from hpcdist.fleet.data_generator import MultiSlotDataGenerator\n"
        "class Words(MultiSlotDataGenerator):\n"
        "    def generate_sample(self, line):\n"
        "        return lambda: [[('w', [len(w) for w in line.split()])]]\n"
        "Words().run_from_stdin()\n"
    )
    done = subprocess.run(
        [sys.executable, str(program)], input=b"to be\nor\n", capture_output=True, check=True
    )
    assert done.stdout == b"2 2 2\n1 2\n"
