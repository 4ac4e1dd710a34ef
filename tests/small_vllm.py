"""A small server with the routes of vLLM that rollouts need: a model on loopback that loads adapters."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from marlhf_lite.evaluation.sampling import SeededSampling, uniform_numbers
from marlhf_lite.models.actor_critic import PolicyModel
from marlhf_lite.models.loading import load_policy
from marlhf_lite.training.rollout import sample


class SmallVLLM(ThreadingHTTPServer):
    """Serves `base`. `requests` are (route, name, body) in their order; `adapters` are those that are loaded now.

    A test makes faults by setting attributes:
        script: statuses of the answers to the next requests; 0 breaks the connection, None is no fault.
        loses: how many loads of adapters succeed without that the client gets the answer.
        sees: the only folder in which the server finds files, as one on another machine does.
        stale: whether it always answers with the first adapter that ever came.
        forgets: whether it says that it has loaded adapters and weights, and has not.
        tied: whether it keeps the old head if it loads weights.
        headless: whether it refuses weights with a separate head.
        spoil: a function that changes an answer; if it returns bytes, these are sent as they are.
        listed: a function that makes the list of models.
        ends_after: after this many completions it breaks the connection of all others; None: never.
        hangs_after: after this many completions it takes requests and does not answer them; None: never.
        well: whether it still says that it is well when it hangs.
    """

    daemon_threads = True

    def __init__(
        self, base, tokenizer, port=0, max_rank=16, max_length=256, lora=True, sees="/", dev=True
    ):
        super().__init__(("127.0.0.1", port), Handler)
        self.base = base
        self.tokenizer = tokenizer
        self.max_rank = max_rank
        self.max_length = max_length
        self.routes = {"completions": self.complete}
        if lora:  # a server that was started without LoRA has no such routes
            self.routes |= {"load_lora_adapter": self.load, "unload_lora_adapter": self.unload}
        if dev:  # as with VLLM_SERVER_DEV_MODE=1
            self.routes |= {"collective_rpc": self.reload}
            self.routes |= {"reset_prefix_cache": lambda body: (200, {})}
        # 1. What was loaded and asked.
        self.weights = None  # of `base`, if all weights were loaded anew
        self.adapters = {}
        self.first = None  # of all adapters that came
        self.requests = []
        self.lock = threading.Lock()  # one request at a time
        # 2. Faults.
        self.script = []
        self.loses = 0
        self.sees = Path(sees)
        self.stale = False
        self.forgets = False
        self.tied = False
        self.headless = False
        self.spoil = lambda answer: answer
        self.listed = lambda served: {"object": "list", "data": served}
        self.ends_after = None
        self.hangs_after = None
        self.hangs = False  # whether it does so now
        self.well = True
        self.freed = threading.Event()  # ends the waiting of requests that hang
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()

    def close(self):
        self.freed.set()
        self.shutdown()
        self.server_close()

    def names(self, route):
        """The names of adapters, models or folders in the requests to a route."""
        return [name for r, name, _ in self.requests if r == route]

    def load(self, body):
        """Load an adapter; return the status and vLLM's message."""
        folder = Path(body["lora_path"])
        name = body["lora_name"]
        if name in self.adapters:
            return 400, f"The lora adapter '{name}' has already been loaded."
        if not folder.is_relative_to(self.sees) or not (folder / "adapter_config.json").is_file():
            return 404, f"Loading lora {name} failed: No adapter found for {folder}"
        rank = json.loads((folder / "adapter_config.json").read_text())["r"]
        if rank > self.max_rank:
            return 500, f"LoRA rank {rank} is greater than max_lora_rank {self.max_rank}."
        if not self.forgets:
            # An adapter's first weights are drawn. The client is in this process, too, and its random state must stay.
            with torch.random.fork_rng(devices=[]):
                self.adapters[name] = PolicyModel(load_policy(self.base, folder, trainable=False))
            self.first = self.first or self.adapters[name]
        return 200, "Success"

    def reload(self, body):
        """Load all weights of the model from a folder; return the status and vLLM's message."""
        folder = Path(body["kwargs"]["weights_path"])
        if not folder.is_relative_to(self.sees) or not (folder / "model.safetensors").is_file():
            return 500, f"Cannot find any model weights with `{folder}`"
        with torch.random.fork_rng(devices=[]):
            model = AutoModelForCausalLM.from_pretrained(folder)
        if self.headless and not model.config.tie_word_embeddings:
            return 500, "There is no module or parameter named 'lm_head' in Gemma2ForCausalLM."
        # The client writes the head separately, unless the server has refused that.
        assert self.headless or not model.config.tie_word_embeddings
        if self.tied:
            model.lm_head.weight.data.copy_(self.base.get_output_embeddings().weight)
        if not self.forgets or self.weights is None:  # a server that forgets goes on with `base`
            self.weights = PolicyModel((self.base if self.forgets else model).eval())
        return 200, {"results": [None]}

    def unload(self, body):
        if self.adapters.pop(body["lora_name"], None) is None:
            return 404, "cannot be found"
        return 200, "Success"

    @torch.no_grad()
    def complete(self, body):
        """Sample a response to a prompt of token ids; return the status and the answer in vLLM's form."""
        ids = torch.tensor([body["prompt"]])
        limit = body["max_tokens"]
        policies = dict(self.adapters)
        if self.weights:
            policies["base"] = self.weights
        if body["model"] not in policies:
            return 404, f"The model `{body['model']}` does not exist."
        if ids.shape[1] + limit > self.max_length:
            return 400, f"This model's maximum context length is {self.max_length} tokens."
        policy = self.first if self.stale else policies[body["model"]]
        policy.model.generation_config.eos_token_id = body["stop_token_ids"]
        shape = (limit, body["temperature"], body["top_k"], body["top_p"], body["min_tokens"])
        # Samples depend on the request's seed alone: the global random state is the client's, too.
        how = SeededSampling(*shape, uniforms=uniform_numbers([str(body["seed"])], limit))
        tokens, mask, ended = sample(policy.model, self.tokenizer, ids, torch.ones_like(ids), how)
        logprobs = policy(tokens, torch.ones_like(tokens), mask.shape[1])[0]
        choice = {"index": 0, "text": "", "finish_reason": "stop" if ended else "length"}
        choice |= {"token_ids": tokens[:, ids.shape[1] :][mask].tolist()}
        choice |= {"logprobs": {"token_logprobs": logprobs[mask].tolist()}}
        head = {"id": "x", "object": "text_completion", "created": 1, "model": body["model"]}
        return 200, self.spoil(head | {"choices": [choice]})


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/health":
            return self.answer(503 if self.server.hangs and not self.server.well else 200, {})
        served = [
            {"id": name, "object": "model", "created": 1, "owned_by": "x"}
            for name in ("base", *self.server.adapters)
        ]
        self.answer(200, self.server.listed(served))

    def do_POST(self):
        server = self.server
        content = self.rfile.read(int(self.headers["Content-Length"] or 0))
        body = json.loads(content or "{}")
        route = self.path.removeprefix("/v1").strip("/")
        name = body.get("lora_name") or body.get("model", "")
        name = name or body.get("kwargs", {}).get("weights_path", "")
        # Status 0 breaks the connection; None lets the request hang first.
        with server.lock:
            server.requests.append((route, name, body))
            completions = len(server.names("completions"))
            if server.ends_after is not None and completions > server.ends_after:
                status, answer = 0, None
            elif server.hangs_after is not None and completions > server.hangs_after:
                server.hangs = True
                status, answer = None, None
            elif server.script and (status := server.script.pop(0)) is not None:
                answer = "a fault"
            elif route in server.routes:
                status, answer = server.routes[route](body)
                if route == "load_lora_adapter" and server.loses:
                    server.loses -= 1
                    status = 0
            else:
                status, answer = 404, "Not Found"
        if status is None:
            server.freed.wait(60)
        if not status:
            self.close_connection = True
            return
        if not isinstance(answer, dict | bytes):  # a message
            answer = {"error": {"message": answer}}
        self.answer(status, answer)

    def answer(self, status, content):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        headers = {
            "Content-Type": "application/json",
            "Content-Length": len(data),
            "retry-after-ms": 1,
        }
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments):
        pass
