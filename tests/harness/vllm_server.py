"""vLLM's own OpenAI server with the connector, by the command of the serving guide."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hsx_dist
from hsx_dist.jobs.kit.process import child
from tests.harness.processes import free_ports, http_status
from tests.harness.snippets import snippets

LAYERS = (1, 4)
API_KEY = "a-key-of-this-server"
GUIDE = Path(hsx_dist.__file__).parents[1] / "docs/guides/serving.md"


@dataclass
class Served:
    url: str
    prefix: str
    storage_options: dict[str, Any]
    client: Any

    def load(self, path: str, **kwargs: Any) -> dict[str, Any]:
        return hsx_dist.load_hidden_states(path, storage_options=self.storage_options, framework="torch", **kwargs)

    def at(self, key: str) -> str:
        return f"{self.prefix}/{hsx_dist.object_name(key)}.safetensors"


@contextmanager
def server(
    model: Path, prefix: str, log: Path, *, beside: Sequence[dict[str, Any]] = (), **more: Any
) -> Iterator[Served]:
    """The server of the serving guide, with another model and the store ``prefix``.

    ``beside``: further connectors, in vLLM's MultiConnector. ``more``: ``env``, ``storage_options``, settings (``hsx``)
    and the server's ``arguments``. None removes an argument.
    """
    import openai

    (port,) = free_ports(1)
    given = shlex.split(snippets(GUIDE)[0].text.replace("\\\n", " "))
    assert given[:3] == ["vllm", "serve", "MODEL"]
    arguments = dict(zip(given[3::2], given[4::2], strict=True))
    speculative, ours = (json.loads(arguments[f"--{name}-config"]) for name in ("speculative", "kv-transfer"))
    speculative["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"] = list(LAYERS)
    ours["kv_connector_extra_config"]["shared_storage_path"] = prefix
    ours["kv_connector_extra_config"]["hsx"] |= more.get("hsx", {})
    several = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"connectors": [*beside, ours]},
    }
    arguments |= {
        "--model": str(model),
        "--served-model-name": "tiny",
        "--host": "127.0.0.1",
        "--port": str(port),
        "--dtype": "float32",
        "--max-model-len": "256",
        "--block-size": "32",
        "--middleware": "hsx_dist.serving.HiddenStatesMiddleware",
        "--api-key": API_KEY,
        "--speculative-config": json.dumps(speculative),
        "--kv-transfer-config": json.dumps(several if beside else ours),
        **more.get("arguments", {}),
    }
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    argv += [word for pair in arguments.items() if pair[1] is not None for word in pair]
    url = f"http://127.0.0.1:{port}"
    with child(argv, log=log, env={"VLLM_LOGGING_LEVEL": "WARNING", **more.get("env", {})}) as running:
        running.wait_until(lambda: http_status(f"{url}/health") == 200, 240)
        # One connection per request: uvicorn closes idle connections after 5 s, and may close a reused one.
        once = {"Connection": "close"}
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=API_KEY, max_retries=0, default_headers=once)
        yield Served(url, prefix, more.get("storage_options", {}), client)
        running.terminate(30)
        assert "Traceback" not in log.read_text()
