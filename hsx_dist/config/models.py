"""The settings of an extraction, as types. Every field has a description. Unknown names are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field, field_validator, model_validator

from hsx_dist.config.checks import (
    check_capture,
    check_chat_template_kwargs,
    check_codec,
    check_deadline,
    check_engine_kwargs,
    check_input,
    check_resources,
    check_sampling_params,
    check_select,
    check_sizes,
)
from hsx_dist.config.engine_arguments import engine_meaning
from hsx_dist.config.secret_names import HIDDEN
from hsx_dist.config.secrets import compared_form, hide_options, hide_secrets, with_shown_names
from hsx_dist.config.urls import check_no_credentials, check_place_of_credentials, public_url

_MIB = 1 << 20
#: Thirty years. Time-outs of Python and Ray overflow beyond three hundred.
MAX_SECONDS = 1e9
Bytes = Annotated[ByteSize, Field(gt=0)]
Options = dict[str, Any]


def _checked(check: Callable[[Any], object], *fields: str, mode: Literal["before", "after"] = "after") -> Any:
    """Return a validator that raises what ``check`` raises, and changes no value."""

    def validate(value: Any) -> Any:
        if value is not None:
            check(value)
        return value

    return field_validator(*fields, mode=mode)(validate)


class Settings(BaseModel):
    """A group of settings: immutable, no unknown names, and a repr that shows no credential."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, hide_input_in_errors=True, validate_default=True, allow_inf_nan=False
    )

    def public(self) -> dict[str, Any]:
        """Return the settings as plain JSON data, without any credential (names stay, values are hidden)."""
        return {name: _public_value(name, getattr(self, name)) for name in type(self).model_fields}

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        yield from self.public().items()


class InputConfig(Settings):
    """Where rows come from, which of them are used, and which of their fields."""

    path: str = Field(
        default="",
        description="A file, a folder or a glob (**, *, ?, […]), local or any fsspec URL; JSONL and text may be "
        "compressed (.gz, .zst, .bz2, .xz). Empty: Python code passes the rows.",
    )
    format: Literal["auto", "jsonl", "text", "parquet", "arrow", "dataset"] = Field(
        default="auto",
        description="Format of rows. jsonl: one object per line; text: one row per line; arrow: IPC files, streams, "
        "Feather; dataset: a folder of Hugging Face save_to_disk. auto: by name, and by a folder's contents.",
    )
    split: str | None = Field(
        default=None, description="Split of a saved DatasetDict. null: all of them, in the order that it names."
    )
    text: str = Field(default="text", min_length=1, description="Name of the field that holds a row's plain text.")
    messages: str = Field(
        default="messages",
        min_length=1,
        description="Name of the field that holds chat messages (role and content; from and value of ShareGPT too).",
    )
    tools: str = Field(
        default="tools", min_length=1, description="Name of the field that holds the tools of a chat, for its template."
    )
    token_ids: str = Field(
        default="token_ids", min_length=1, description="Name of the field that holds ready token ids."
    )
    id: str | None = Field(
        default="id",
        description="Name of the field that holds a row's key (a string or an integer, unique). "
        "null, or a row without it: the key is FILE:ROW.",
    )
    loss_mask: str = Field(
        default="loss_mask",
        min_length=1,
        description="Name of the field that holds a 0 or 1 for each token; it is stored with the sample.",
    )
    loss_roles: list[str] | None = Field(
        default=None,
        min_length=1,
        description="Derive the loss mask of chats: 1 for the contents of messages with these roles, e.g. [assistant]. "
        "A row's own mask has priority.",
    )
    metadata: list[str] = Field(
        default_factory=list, description="Names of further fields that are stored with each sample, as JSON."
    )
    max_length: int | None = Field(
        default=None, ge=1, description="Longest accepted row, in tokens. null: the engine's limit (max_model_len - 1)."
    )
    too_long: Literal["skip", "truncate", "fail"] = Field(
        default="skip",
        description="What happens to a longer row. skip: it is refused, with the reason; truncate: its first tokens "
        "are used; fail: it counts as failed, and so does the run. A row that an earlier attempt refused stays "
        "refused.",
    )
    max_row_bytes: Bytes = Field(
        default=ByteSize(16 * _MIB),
        description="Largest decompressed line, or row of a table. A larger one is refused, and not kept in memory. As "
        "Python objects, a row may take 12 times as much.",
    )
    sample: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Take this share of the rows, chosen by a hash of their position. A larger share contains the rows "
        "of a smaller one.",
    )
    sample_seed: int = Field(default=0, description="Seed for sampling rows.")
    num_shards: int = Field(default=1, ge=1, description="Number of separate runs that divide the input.")
    shard_index: int = Field(
        default=0, ge=0, description="The shard of this run. It takes the rows with number % num_shards == shard_index."
    )
    limit: int | None = Field(
        default=None, ge=0, description="Limit of the rows after sample and shard. Refused rows count."
    )
    storage_options: Options = Field(
        default_factory=dict, description="fsspec options for reading the input. Never shown."
    )

    _path = _checked(check_place_of_credentials, "path")

    @model_validator(mode="after")
    def _agree(self) -> InputConfig:
        check_input(self)
        return self

    def meaning(self) -> dict[str, Any]:
        """Return the settings that determine a row's key and sample.

        Leaves out limits on the number of rows, because a run may be extended. Also leaves out settings with their
        default, except those that every run has stored.
        """
        meaning: dict[str, Any] = {name: getattr(self, name) for name in ("text", "messages", "token_ids", "id")}
        for name in ("tools", "loss_mask", "loss_roles", "metadata", "max_length"):
            if (value := getattr(self, name)) != type(self).model_fields[name].get_default(call_default_factory=True):
                meaning[name] = value
        if self.too_long == "truncate":
            meaning["too_long"] = "truncate"
        return meaning


class WritersConfig(Settings):
    """The pool that turns pages into stored parts."""

    per_node: int = Field(default=1, ge=1, description="Writer actors on each node.")
    num_cpus: float = Field(default=1.0, ge=0, description="CPU cores that Ray reserves for one writer.")
    threads: int = Field(default=2, ge=1, le=256, description="Compression threads of one writer.")
    credit_bytes: Bytes = Field(
        default=ByteSize(256 * _MIB), description="Maximum bytes of pages that one writer holds."
    )
    uploads: int = Field(default=4, ge=1, le=256, description="Parts that one writer uploads at once.")


class ReplicaConfig(Settings):
    """What Ray reserves for, and passes to, the actor of one vLLM engine."""

    num_cpus: float = Field(default=1, ge=0, description="CPU cores of one replica's actor.")
    num_gpus: float | None = Field(
        default=None,
        ge=0,
        description="GPUs of one replica's actor. null: as many as the engine's "
        "tensor parallel size if the cluster has GPUs, else 0.",
    )
    resources: dict[str, float] = Field(default_factory=dict, description="Custom Ray resources of one replica.")
    env: dict[str, str] = Field(default_factory=dict, description="Environment variables of one replica. Never shown.")

    _resources = _checked(check_resources, "resources")


class StoreConfig(Settings):
    """Access to the output's store."""

    storage_options: Options = Field(
        default_factory=dict, description="fsspec options for the output's store. Never shown."
    )
    backend: Literal["auto", "fsspec", "obstore"] = Field(
        default="auto",
        description="Library for an output in an object store. auto: obstore if it does the same as fsspec with these "
        "options and this environment, else fsspec.",
    )
    shared: bool = Field(
        default=False,
        description="true: the output is a local path on a file system that all nodes share. false: a job with a local "
        "path does not start on a cluster of several nodes. In both cases a node gets no writers if this path is "
        "another folder there.",
    )
    retry_seconds: float = Field(
        default=120.0, ge=0, description="Seconds for which a failing call to the store is repeated."
    )
    single_driver: bool = Field(
        default=False,
        description="Accept a store without conditional puts, to finish an existing run. Run only one driver on it at "
        "a time: a second one is not detected.",
    )


class ExtractConfig(Settings):
    """One extraction: a model's hidden states for the rows of an input, stored at an output.

    ``pydantic.ValidationError``: a setting is wrong. ``load_config`` raises ``ConfigError`` instead.

    Example:
        >>> ExtractConfig(model="MODEL", output="runs/one", layers=[15]).codec
        'split'
    """

    output: str = Field(min_length=1, description="Folder or URL of the run, e.g. runs/demo or s3://bucket/prefix.")
    model: str = Field(min_length=1, description="Hugging Face id, a model folder, or builtin:smollm2-135m-instruct.")
    revision: str | None = Field(
        default=None, description="Revision of the model on the Hugging Face hub. The run uses its commit."
    )
    layers: list[int | str] | str | int = Field(
        default="eagle3",
        description="Layer ids (0: embeddings, N: the last output before the final norm), -1 or last, all, or eagle3. "
        "eagle3: the ids 2, N/2 (rounded down), N-3 and N, for EAGLE-3 draft trainers.",
    )
    capture: dict[str, Any] | None = Field(
        default=None,
        description="Points of the model instead of layers: {points: {q: [15], mlp_out: all}}, or {preset: "
        "hidden-states | attention | mlp | residual | full}. Sets source to taps. null: hidden states at layers.",
    )
    source: Literal["cache", "taps"] = Field(
        default="cache",
        description="How states are captured. cache: by vLLM's extract_hidden_states; taps: by this package's hooks, "
        "at any point, also in models that extract_hidden_states refuses. With capture the default is taps.",
    )
    engine_kwargs: Options = Field(
        default_factory=dict, description="Arguments for vLLM's engine, passed on unchanged."
    )
    sampling_params: Options = Field(
        default_factory=dict, description="Arguments for vLLM's SamplingParams, passed on unchanged."
    )
    chat_template_kwargs: Options = Field(
        default_factory=dict, description="Arguments for the tokenizer's apply_chat_template."
    )
    include_output_tokens: bool = Field(
        default=False, description="Store the states of generated tokens too, not only the prompt's."
    )
    select: str = Field(
        default="all",
        description="Tokens whose states are sent to writers and stored: all, last, stride:N, loss_mask (those whose "
        "mask is 1), mean (one float32 row, the mean over all tokens). Draft trainers need all.",
    )
    input: InputConfig = Field(default_factory=InputConfig, description="Where the rows come from.")
    codec: str | dict[str, Any] = Field(
        default="split",
        description="Encoding of the states: a name (split, zstd, none; fp8-token loses precision), or a mapping "
        "with name and parameters.",
    )
    layout: Literal["part", "sample"] = Field(
        default="part", description="part: many samples in an object; sample: one object for each sample."
    )
    part_bytes: Bytes = Field(default=ByteSize(256 * _MIB), description="Encoded size at which a part is stored.")
    segment_bytes: Bytes = Field(
        default=ByteSize(64 * _MIB), description="Raw size above which a sample is stored in several segments."
    )
    page_bytes: Bytes = Field(default=ByteSize(8 * _MIB), description="Raw size of a page, copied and sent at once.")
    part_seconds: float = Field(
        default=60.0, gt=0, description="Age in seconds at which a part is stored, even if it is small."
    )
    in_flight_bytes: Bytes = Field(
        default=ByteSize(256 * _MIB), description="Host memory of one replica for states not yet sent."
    )
    min_replicas: int = Field(default=1, ge=1, description="Replicas that the cluster must have room for at the start.")
    max_replicas: int = Field(
        default=1, ge=1, description="Maximum number of replicas. Those without resources wait while the others work."
    )
    task_rows: int = Field(
        default=64,
        ge=1,
        description="Rows that a replica gets at once. A task ends earlier at 4 MiB of rows as Python objects.",
    )
    max_tries: int = Field(default=3, ge=1, description="Number of tries before a row counts as failed.")
    pool: Literal["ray", "threads"] = Field(
        default="ray", description="ray: replicas and writers are Ray actors. threads: all run in one process."
    )
    writers: WritersConfig = Field(
        default_factory=WritersConfig, description="The pool that turns pages into stored parts."
    )
    replica: ReplicaConfig = Field(default_factory=ReplicaConfig, description="Resources of one replica's actor.")
    store: StoreConfig = Field(default_factory=StoreConfig, description="Access to the output.")
    resume: Literal["allow", "must", "never"] = Field(
        default="allow",
        description="allow: continue an existing run, or start one; must: only continue; never: only start.",
    )
    retry_poison: bool = Field(
        default=False,
        description="Try rows again that killed their engine in an earlier attempt, like other failed rows.",
    )
    max_rows: int | None = Field(
        default=None,
        ge=1,
        description="End the run when this many samples are stored, including those of earlier attempts.",
    )
    max_bytes: Bytes | None = Field(
        default=None,
        description="End the run when its parts have this many bytes, including those of earlier attempts. Samples in "
        "flight are estimated by the mean size of stored ones.",
    )
    deadline: float | datetime | None = Field(
        default=None,
        description="Time at which the run ends: seconds from the start, or an ISO 8601 time with its zone. Rows that "
        "are computed by then are stored.",
    )
    max_stored_bytes: Bytes | None = Field(
        default=None,
        description="Pause while data/ holds this many bytes, until consumers have deleted some objects.",
    )
    stop_seconds: float = Field(
        default=25.0,
        gt=0,
        le=MAX_SECONDS,
        description="Seconds in which a stopped run (SIGTERM, a node's drain notice, deadline) stores computed rows. "
        "Must be less than the grace period of the scheduler or operator that stops the run.",
    )
    wait_seconds: float = Field(
        default=0.0,
        ge=0,
        description="Seconds to wait for nodes with room for a replica, e.g. from an autoscaler. 0: a cluster without "
        "room for min_replicas is refused.",
    )
    check_samples: int = Field(
        default=0, ge=0, description="Number of samples to compare with transformers at the end."
    )

    _deadline = field_validator("deadline", mode="before")(check_deadline)
    _places = _checked(check_no_credentials, "output", "model", "revision")
    _codec = _checked(check_codec, "codec", mode="before")
    _select = _checked(check_select, "select")
    _sampling_params = _checked(check_sampling_params, "sampling_params")
    _chat_template_kwargs = _checked(check_chat_template_kwargs, "chat_template_kwargs")

    @field_validator("layers", mode="before")
    @classmethod
    def _layers(cls, value: object) -> object:
        items = value if isinstance(value, (list, tuple)) else [value]
        if not items or not all(isinstance(i, (int, str)) and not isinstance(i, bool) for i in items):
            raise ValueError(
                f"expected layer ids such as [2, 15, last], or all, or eagle3, got {value!r}. Correct the list"
            )
        return list(items) if isinstance(value, tuple) else value

    @field_validator("engine_kwargs")
    @classmethod
    def _engine_kwargs(cls, value: dict[str, Any]) -> dict[str, Any]:
        check_engine_kwargs(value)
        check_no_credentials(str(value.get("tokenizer")))
        return value

    @model_validator(mode="before")
    @classmethod
    def _source_of_capture(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and given.get("capture") is not None:
            return {"source": "taps", **given}
        return given

    @model_validator(mode="after")
    def _sizes(self) -> ExtractConfig:
        check_sizes(self)
        check_capture(self)
        return self

    def meaning(self) -> dict[str, Any]:
        """Return the settings that determine a sample's content. A run can resume only if they are equal.

        ``layers`` has the user's form. A caller that knows the model's depth replaces it by the resolved ids.
        """
        meaning: dict[str, Any] = {
            "model": public_url(self.model),
            "revision": self.revision,
            "layers": self.layers,
            "chat_template_kwargs": self.chat_template_kwargs,
            "include_output_tokens": self.include_output_tokens,
            "engine_kwargs": engine_meaning(self.engine_kwargs),
            "input": self.input.meaning(),
        }
        if self.select != "all":
            meaning["select"] = self.select
        if self.include_output_tokens:
            meaning["sampling_params"] = self.sampling_params
        return compared_form(meaning)  # type: ignore[no-any-return]


def _public_value(name: str, value: Any) -> Any:
    if isinstance(value, Settings):
        return value.public()
    if name == "storage_options":
        return hide_options(value)
    if name == "env":
        return with_shown_names((variable, HIDDEN) for variable in value)
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, datetime):
        return value.isoformat()
    return hide_secrets(value)
