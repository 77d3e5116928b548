"""Functions that load code, pickles or typed tables are used only in the few modules that guard them."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import hsx_dist

PACKAGE = Path(hsx_dist.__file__).parent

#: Name → the modules that use it. They load what a configuration or a command names, never what a run names.
USED_BY = {
    "trust_remote_code": {
        *("jobs/check.py", "jobs/doctor.py", "inputs/encode.py", "jobs/preflight.py", "connector/object_writer.py"),
        "jobs/reference.py",  # it passes False, for transformers' own class
    },
    "trusts_remote_code": {
        *("jobs/check.py", "jobs/doctor.py", "inputs/encode.py", "jobs/preflight.py", "config/engine_arguments.py"),
    },
    "AutoTokenizer": {"inputs/encode.py", "connector/object_writer.py"},
    "AutoConfig": {"jobs/doctor.py", "jobs/preflight.py"},
    "AutoModel": {"jobs/check.py", "jobs/reference.py"},
    "load_tokenizer": {
        *("inputs/encode.py", "jobs/doctor_engine.py", "jobs/plan.py", "jobs/preflight.py", "fleet/same_model.py"),
    },
    "choose_decoder": {"jobs/decode.py", "cli/inspect.py", "cli/report.py"},
    "load_decoder": {"jobs/decode.py"},
    "snapshot_download": {"model_parts/model_files.py"},
    # These decode an Arrow schema, and with it registered extension types.
    "open_stream": {"inputs/arrow_files.py"},
    "ParquetFile": {"inputs/arrow_files.py"},
    "open_file": {"inputs/arrow_files.py"},
    # A tokenizer's JSON. Dataset.from_file of Hugging Face decodes an Arrow schema too.
    "from_file": {"jobs/decode.py"},
    # The conformance suites pickle their own codecs and errors. The reader's processes run this package alone.
    "pickle": {"testing/codec_suite.py", "testing/store_suite.py", "inputs/reader.py", "inputs/reader_child.py"},
    # Pickles settings to check that Ray can, and loads nothing.
    "cloudpickle": {"ray_arguments.py"},
}
#: No module uses these.
UNUSED = {
    *("AutoModelForCausalLM", "hf_hub_download", "dill", "joblib", "marshal", "runpy", "Unpickler"),
    *(
        "read_metadata",
        "read_table",
        "read_schema",
        "read_message",
        "read_record_batch",
        "read_feather",
        "ParquetDataset",
    ),
    *("RecordBatchStreamReader", "RecordBatchFileReader", "load_from_disk", "load_dataset", "read_parquet"),
    *("allow_pickle", "unsafe_load", "full_load"),
}


def test_only_guarded_modules_use_what_loads_code() -> None:
    found: dict[str, set[str]] = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        place = path.relative_to(PACKAGE).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Name(id="eval" | "exec" | "__import__")):
                    raise AssertionError(f"{place}:{node.lineno}: got a call of eval, exec or __import__")
                case ast.Call(func=ast.Attribute(value=ast.Name(id="torch" | "np" | "numpy"), attr="load")):
                    raise AssertionError(f"{place}:{node.lineno}: got torch.load or numpy.load, which unpickle")
                case ast.Name(id=name) | ast.Attribute(attr=name) | ast.keyword(arg=name) | ast.alias(name=name):
                    found[str(name)].add(place)
                case ast.FunctionDef(name=name):
                    found[name].add(place)
    assert {name: found[name] for name in USED_BY} == USED_BY
    assert sorted(UNUSED & found.keys()) == []
