"""Run files and overrides: what they come to, and everything that is wrong with them at once."""

from __future__ import annotations

import string
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayapp.config.load import LoadedRunFile, load_run_file
from rayapp.config.schema import RunFile
from rayapp.errors import Problem, RunFileError

ROOT = Path(__file__).parents[3]


def load(tmp_path: Path, text: str, *overrides: str) -> LoadedRunFile:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return load_run_file(path, overrides)


def problems(tmp_path: Path, text: str, *overrides: str) -> list[Problem]:
    with pytest.raises(RunFileError) as caught:
        load(tmp_path, text, *overrides)
    return [Problem(p.subject, p.rule, p.remedy, p.where.replace(f"{tmp_path}/", "") if p.where else None) for p in caught.value.problems]


@pytest.mark.parametrize("path", sorted((ROOT / "jobs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_file_loads(path: Path) -> None:
    assert load_run_file(path).file.name


def test_the_shortest_file_has_the_schemas_defaults(tmp_path: Path) -> None:
    assert load(tmp_path, "name: x").file == RunFile(name="x")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1e-4", 1e-4), ("1E3", 1000.0), ("2.0e-3", 0.002), (".5", 0.5), ("3.", 3.0), ("+1e+2", 100.0), ("2", 2.0)],
)
def test_a_number_is_read_as_in_yaml_1_2(tmp_path: Path, text: str, expected: float) -> None:
    assert load(tmp_path, f"name: x\noptim: {{learning_rate: {text}}}").file.optim.learning_rate == expected
    assert load(tmp_path, "name: x", f"optim.learning_rate={text}").file.optim.learning_rate == expected


@pytest.mark.parametrize("word", ["yes", "no", "on", "off", "2026-01-01", "0123456", "12:30:00", "1_000", "08"])
def test_words_that_yaml_1_1_reads_as_something_else_stay_text(tmp_path: Path, word: str) -> None:
    assert load(tmp_path, f"name: x\nmodel: {{kind: pretrained, path: x, revision: {word}}}").file.model.revision == word


@pytest.mark.parametrize(("text", "value"), [("0x10", 16), ("0o17", 15), ("-0", 0), ("true", True), ("~", None), ("", None)])
def test_core_schema_scalars(tmp_path: Path, text: str, value: object) -> None:
    found = load(tmp_path, f"name: x\nmodel: {{config: {{a: {text}}}}}").file.model.config["a"]
    assert (found, type(found)) == (value, type(value))


def test_every_problem_is_reported_at_once_with_its_line(tmp_path: Path) -> None:
    text = """\
name: a b
batch: {global_batch_size: 32.0}
data:
  sequence_lenth: 32
  validation_fraction: 1.5
optim: {learning_rate: true}
model: {kind: pretrained}
train:
  precision: bf17
  activation_checkpointing: yes
resources: {env: {A: 1}}
name: c
"""
    found = problems(tmp_path, text, "train.seed=-1", "oops")
    assert [(p.where, p.subject, p.rule, p.remedy) for p in found] == [
        ("run.yaml:1", "name=a b", "does not match ^[A-Za-z0-9][A-Za-z0-9._-]*$", ""),
        ("run.yaml:2", "batch.global_batch_size=32.0", "is not an integer", "write 32"),
        ("run.yaml:4", "data.sequence_lenth=32", "is not a key of data", "did you mean sequence_length?"),
        ("run.yaml:5", "data.validation_fraction=1.5", "is not less than 1", "use a value less than 1"),
        ("run.yaml:6", "optim.learning_rate=true", "is not a number", "write a plain number"),
        ("run.yaml:7", "model:", "kind: pretrained needs path", "give a local folder or a hub name"),
        ("run.yaml:9", "train.precision=bf17", "is not 'fp32', 'bf16' or 'fp16'", "did you mean bf16?"),
        ("run.yaml:10", "train.activation_checkpointing=yes", "is not true or false", "write true"),
        ("run.yaml:11", "resources.env.A=1", "is not a string", "put it in quotes"),
        ("run.yaml:12", "name", "is given twice, first in line 1", "drop one of the two"),
        ("command line", "oops", "is not an override", "write section.key=value, such as batch.global_batch_size=64"),
        ("command line", "train.seed=-1", "is not at least 0", "use a value at least 0"),
    ]


@pytest.mark.parametrize(
    ("section", "rule", "remedy"),
    [
        ("serve: {tensor_parallel_size: 0}", "is not greater than 0 or 'auto'", "use 1 or more"),
        ("serve: {tensor_parallel_size: atuo}", "is not an integer or 'auto'", "did you mean auto?"),
        ("data: {source: 5}", "is not a string or a list", "put it in quotes"),
        ("data: {source: [{path: a, weight: 0}]}", "is not greater than 0", "use 1 or more"),
        ("data: {source: [{path: a, wieght: 1}]}", "is not a key of data.source.0", "did you mean weight?"),
        ("batch: 5", "is not a mapping of keys", ""),
        ("batch:", "is not a mapping of keys", "leave the key out for its default"),
        ("batch: {global_batch_size: '32'}", "is not an integer", "write 32 without quotes"),
        ("batch: {global_batch_size: 032}", "is not an integer", "write 32"),
        ("batch: {global_batch_size: 1_024}", "is not an integer", "write 1024"),
        ("batch: {global_batch_size: true}", "is not an integer", "write a plain number"),
        ("optim: {learning_rate: '1e-4'}", "is not a number", "write 1e-4 without quotes"),
        ("optim: {learning_rate: .nan}", "is not a finite number", ""),
        ("optim: {betas: 0.9}", "is not a list", "write it as [a, b]"),
        ("optim: {betas: [0.9]}", "is missing", "add it"),
        ("optim: {betas: [0.9, 0.9, 0.9]}", "is longer than 2", ""),
        ("parallel: {zero_stage: 4}", "is not 1, 2 or 3", ""),
        ("parallel: {zero_stage: 2.0}", "is not an integer", "write 2"),
        ("tune: {space: {zero_stage: [true]}}", "is not an integer", "write a plain number"),
        ("train: {micro_batch_size: 2}", "is not a key of train", "did you mean batch.micro_batch_size?"),
        ("micro_batch_size: 2", "is not a key of the run file", "did you mean batch.micro_batch_size?"),
        ("batch: {xyz: 2}", "is not a key of batch", "its keys are global_batch_size, micro_batch_size, gradient_accumulation_steps"),
        ("model: {config: {a: !!timestamp 2026-01-01}}", "cannot be read: the tag", ""),
        ("model: {config: {[1]: 2}}", "is not plain text", "quote it"),
        ('model: {config: {a: "\\ud800"}}', "cannot be read: ", ""),
    ],
)
def test_one_problem_each(tmp_path: Path, section: str, rule: str, remedy: str) -> None:
    (found,) = problems(tmp_path, f"name: x\n{section}\n")
    assert found.where == "run.yaml:2"
    assert found.rule.startswith(rule)
    assert found.remedy == remedy


DOUBLING_ALIASES = "l0: &l0 [1, 1]\n" + "".join(f"l{n}: &l{n} [*l{n - 1}, *l{n - 1}]\n" for n in range(1, 25))


@pytest.mark.parametrize(
    ("text", "rule", "where"),
    [
        ("", "is empty", "run.yaml"),
        ("# nothing\n", "is empty", "run.yaml"),
        ("- a\n", "is not a mapping of keys", "run.yaml"),
        ("name: x\nbatch: [1\n", "is not YAML", "run.yaml:3"),
        ("name: x\n---\nname: y\n", "is not YAML", "run.yaml:2"),
        ("name: x\n\tbatch: 1\n", "is not YAML", "run.yaml:2"),
        ('name: "\\UFFFFFFFF"', "is not YAML", "run.yaml"),
        ("name: \x00", "is not YAML", "run.yaml"),
        ("a: " + "[" * 5000, "is nested deeper", "run.yaml"),
        ("name: x\nmodel: {config: &a {b: *a}}", "is nested deeper", "run.yaml:2"),
(DOUBLING_ALIASES, "has more than", "run.yaml"),
    ],
)  # fmt: skip
def test_a_text_that_is_no_run_file(tmp_path: Path, text: str, rule: str, where: str) -> None:
    (found,) = problems(tmp_path, text)
    assert found.rule.startswith(rule)
    assert found.where == where


def test_a_missing_file_suggests_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "quickstart.yaml").write_text("name: x")
    with pytest.raises(RunFileError, match=r"does not exist; did you mean .*/quickstart.yaml\?"):
        load_run_file(tmp_path / "quikstart.yaml")


def test_a_folder_and_bytes_that_are_no_text(tmp_path: Path) -> None:
    with pytest.raises(RunFileError, match="is a folder"):
        load_run_file(tmp_path)
    path = tmp_path / "run.yaml"
    path.write_bytes("name: x\n# é".encode("latin-1"))
    with pytest.raises(RunFileError, match=r"run\.yaml:2: the text is not UTF-8"):
        load_run_file(path)


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"\xef\xbb\xbfname: x")
    assert load_run_file(path).file.name == "x"


def test_overrides_replace_add_and_unset(tmp_path: Path) -> None:
    text = "name: x\nbatch: {global_batch_size: 8, micro_batch_size: 4}\ndata: {source: [{path: a}, {path: b}]}\ntrain:\n"
    overrides = ["batch.micro_batch_size=null", "batch.global_batch_size=16", "batch.global_batch_size=24", "data.source.1.weight=2"]
    file = load(
        tmp_path, text, *overrides, "model.config.hidden_size=128", "train.seed=3", "generate={top_p: 0.5}", "storage.path=a=b"
    ).file
    assert (file.batch.global_batch_size, file.batch.micro_batch_size) == (24, None)
    assert [source.weight for source in file.data.source if not isinstance(source, str)] == [1.0, 2.0]
    assert file.model.config == {"hidden_size": 128}
    assert file.storage.path == "a=b"
    assert (file.train.seed, file.generate.top_p, file.generate.max_new_tokens) == (3, 0.5, 64)


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("batch", "is not an override"),
        ("=3", "is not an override"),
        ("batch..x=3", "is not an override"),
        ("batch. x=3", "is not an override"),
        ("name=", "has no value"),
        ("name=#x", "has no value"),
        ("name=[", "has a value that does not work: the text is not YAML"),
        ("model.config={a: 1, a: 2}", "has a value that does not work: a is given twice"),
        ("name.x=3", "goes inside name=x, which holds no keys"),
        ("data.source.2.weight=3", "names no entry of data.source, which has 2"),
        ("data.source.-1.weight=3", "names no entry of data.source, which has 2"),
        ("data.source.weight=3", "names no entry of data.source, which has 2"),
        ("batch.global_batch=3", "is not a key of batch"),
        ("optim.betas.0=0.5", "is not a list"),
    ],
)
def test_an_override_that_does_not_work_is_named(tmp_path: Path, override: str, rule: str) -> None:
    (found,) = problems(tmp_path, "name: x\ndata: {source: [{path: a}, {path: b}]}", override)
    assert found.where == "command line"
    assert found.rule.startswith(rule)
    assert found.subject.partition("=")[0].startswith(override.partition("=")[0][:6])


def test_origins_cover_every_value_and_name_its_place(tmp_path: Path) -> None:
    text = "name: x\nbatch:\n  global_batch_size: 8\n  micro_batch_size: 2\ndata:\n  source:\n    - path: a\n    - {path: b, weight: 2}\n"
    loaded = load(tmp_path, text, "batch.micro_batch_size=4", "data.source.0={path: c}")
    path = str(tmp_path / "run.yaml")
    assert loaded.where("name") == f"{path}:1"
    assert loaded.where("batch.global_batch_size") == f"{path}:3"
    assert loaded.where("batch.micro_batch_size") == "command line"
    assert loaded.where("data.source.0.path") == "command line"
    assert loaded.where("data.source.1.weight") == f"{path}:8"
    assert loaded.where("data.source.1.format") is None
    assert loaded.where("optim.eps") is None
    assert loaded.where("no.such.key") is None
    kinds = {key: origin.kind for key, origin in loaded.origins.items() if origin.kind != "default"}
    assert kinds == {
        "name": "file",
        "batch.global_batch_size": "file",
        "batch.micro_batch_size": "override",
        "data.source.0.path": "override",
        "data.source.1.path": "file",
        "data.source.1.weight": "file",
    }
    assert {key.split(".")[0] for key in loaded.origins} == set(RunFile.model_fields)


NEARLY_YAML = st.text(alphabet=string.ascii_lowercase[:6] + "01.-:{}[]&*!|>%@`\"'\\#?,~ \n\tuUx", max_size=60)
KEYS = st.sampled_from(["name", "batch", "data.source.0", "optim.betas.1", "model.config.a.b", "storage.path", "", "."])


@settings(max_examples=400, deadline=None)
@given(content=st.one_of(st.binary(max_size=80), st.text(max_size=80).map(lambda t: t.encode("utf-8", "surrogatepass")),
                         NEARLY_YAML.map(str.encode), NEARLY_YAML.map(lambda t: f"name: x\nmodel: {{config: {{a: {t}}}}}".encode())),
       overrides=st.lists(st.one_of(st.text(max_size=20), st.tuples(KEYS, NEARLY_YAML).map("=".join)), max_size=2))  # fmt: skip
def test_any_text_loads_or_is_a_run_file_error(tmp_path_factory: pytest.TempPathFactory, content: bytes, overrides: list[str]) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(content)
    try:
        loaded = load_run_file(path, overrides)
    except RunFileError as error:
        str(error).encode("utf-8")
    else:
        loaded.file.model_dump_json()


@given(st.text(max_size=20))
def test_any_file_name(name: str) -> None:
    with pytest.raises(RunFileError):
        load_run_file(Path("/proc/self/no such folder") / name.strip("/."))
