// The call of the form as a command of curl, and as Python.

import { element, shown, withoutJson } from "./tensors.js";

const MOST_VALUES = 256;
const TYPES = {
  BOOL: "np.bool_", FP16: "np.float16", BF16: "ml_dtypes.bfloat16", FP32: "np.float32", FP64: "np.float64", BYTES: "object",
};

/** Return the command, or why there is none. */
export function curl(url, tensors, outputs) {
  const binary = [...tensors, ...outputs].find(withoutJson);
  if (binary) return `# ${binary.name} is ${binary.datatype}, which JSON has no form for: see Python.`;
  if (tensors.some(isLarge)) return "# The inputs are too large for a command line: see Python.";
  const inputs = tensors.map((tensor) => {
    const data = list(Array.from(tensor.values, (value, index) => (
      tensor.datatype === "BYTES" ? JSON.stringify(value) : shown(tensor, index))));
    const { name, datatype, shape } = tensor;
    return `{"name": ${JSON.stringify(name)}, "datatype": "${datatype}", "shape": ${list(shape)}, "data": ${data}}`;
  });
  const body = `{"inputs": [\n    ${inputs.join(",\n    ")}]}`;
  return `curl ${quoted(url)} -H 'Content-Type: application/json' -d ${quoted(body)}`;
}

/** Return a script for Triton's client. */
export function python(address, secure, { name, version }, tensors, outputs) {
  const brain = tensors.some(({ datatype }) => datatype === "BF16") ? ["import ml_dtypes"] : [];
  const lines = [...brain, "import numpy as np", "import tritonclient.http as http", ""];
  lines.push(`client = http.InferenceServerClient(${JSON.stringify(address)}${secure ? ", ssl=True" : ""})`);
  lines.push("inputs = []");
  for (const tensor of tensors) {
    const type = TYPES[tensor.datatype] || `np.${tensor.datatype.toLowerCase()}`;
    const value = isLarge(tensor)
      ? `np.zeros(${list(tensor.shape)}, ${type})  # put your values here`
      : `np.array(${numbers(tensor)}, ${type}).reshape(${list(tensor.shape)})`;
    lines.push(`value = ${value}`);
    lines.push(`inputs.append(http.InferInput(${JSON.stringify(tensor.name)}, value.shape, "${tensor.datatype}"))`);
    lines.push("inputs[-1].set_data_from_numpy(value)");
  }
  const which = version ? `, model_version=${JSON.stringify(version)}` : "";
  lines.push(`answer = client.infer(${JSON.stringify(name)}, inputs${which})`);
  outputs.forEach(({ name }) => lines.push(`print(answer.as_numpy(${JSON.stringify(name)}))`));
  return lines.join("\n");
}

const isLarge = (tensor) => tensor.values.length > MOST_VALUES;
const list = (numbers) => `[${numbers.join(", ")}]`;
const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

function numbers(tensor) {
  return list(Array.from(tensor.values, (_, index) => {
    const value = element(tensor, index);
    if (typeof value === "boolean") return value ? "True" : "False";
    if (typeof value === "string") return JSON.stringify(value);
    return Number.isNaN(value) ? "np.nan" : shown(tensor, index).replace("Infinity", "np.inf");
  }));
}
