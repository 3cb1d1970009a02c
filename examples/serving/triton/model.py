"""A bundle by Triton's Python backend: `REPOSITORY/NAME/1/model.py` beside `bundle`, see README.md."""

import json
from pathlib import Path

import triton_python_backend_utils as triton

from aotexport_runtime import Servable
from aotexport_runtime.server.refusals import refusal_of

CODES = {
    "invalid": triton.TritonError.INVALID_ARG,
    "overloaded": triton.TritonError.UNAVAILABLE,
    "unavailable": triton.TritonError.UNAVAILABLE,
}


class TritonPythonModel:
    """One instance: a loaded bundle that has proven itself."""

    def initialize(self, arguments):
        """Load the bundle of this version, and compare its recorded calls with what eager gave."""
        self.outputs = [each["name"] for each in json.loads(arguments["model_config"])["output"]]
        version = Path(arguments["model_repository"]) / arguments["model_version"]
        self.servable = Servable(version / "bundle", max_latency_ms=0)
        self.servable.warm_up()

    def execute(self, requests):
        """Answer requests that Triton has gathered; those that fit run as one batch, and each fails alone."""
        return [
            self._answer(request, waiting) for request, waiting in [(each, self._submit(each)) for each in requests]
        ]

    def finalize(self):
        """Let go of the bundle."""
        self.servable.close()

    def _submit(self, request):
        inputs = {each.name(): each.as_numpy() for each in request.inputs()}
        try:
            return self.servable.submit(inputs)
        except Exception as error:
            return error

    def _answer(self, request, waiting):
        try:
            if isinstance(waiting, Exception):
                raise waiting
            values = waiting.result()
        except Exception as error:
            refusal = refusal_of(error)
            code = CODES.get(refusal.kind, triton.TritonError.INTERNAL)
            return triton.InferenceResponse(error=triton.TritonError(str(refusal), code))
        wanted = set(request.requested_output_names())
        tensors = [triton.Tensor(name, values[name]) for name in self.outputs if name in wanted]
        return triton.InferenceResponse(tensors)
