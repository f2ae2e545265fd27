"""LitServe: one API for each model, with its own batching."""

from __future__ import annotations

from collections.abc import Iterator

import litserve
import torch

from tests.bench import serving_models as m


class ClassifierAPI(litserve.LitAPI):
    def setup(self, device: str) -> None:
        self.model = m.Classifier()

    # Without an annotation LitServe passes the JSON of the body.
    def decode_request(self, request):  # type: ignore[no-untyped-def]
        return request["row"]

    def batch(self, inputs: list[list[float]]) -> torch.Tensor:
        return torch.tensor(inputs)

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)

    def unbatch(self, output: torch.Tensor) -> list[list[float]]:
        scores: list[list[float]] = output.tolist()
        return scores

    def encode_response(self, output: list[float]) -> dict[str, list[float]]:
        return {"scores": output}


class LanguageAPI(litserve.LitAPI):
    def setup(self, device: str) -> None:
        self.model = m.LanguageModel()

    def decode_request(self, request):  # type: ignore[no-untyped-def]
        return request["tokens"]

    def predict(self, x: int) -> Iterator[int]:
        yield from self.model.generate(x)

    def encode_response(self, output: Iterator[int]) -> Iterator[str]:
        for token in output:
            yield f"data: {token}\n\n"


def main() -> None:
    options = m.arguments()
    apis = [
        ClassifierAPI(
            max_batch_size=m.BATCH_MAX,
            batch_timeout=m.BATCH_WAIT_S,
            api_path="/predict",
        ),
        LanguageAPI(stream=True, api_path="/generate"),
    ]
    server = litserve.LitServer(
        apis,
        accelerator="cpu",
        workers_per_device=1,
        timeout=60,
        healthcheck_path="/healthz",
    )
    server.run(
        host="127.0.0.1",
        port=options.port,
        num_api_servers=options.web_workers,
        generate_client_file=False,
        log_level="warning",
        access_log=False,
    )


if __name__ == "__main__":
    main()
