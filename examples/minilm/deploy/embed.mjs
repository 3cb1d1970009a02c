// Embeds tokens by the bundle's ONNX model, in Node.js: `npm install onnxruntime-web`, then
//   node embed.mjs BUNDLE TOKENS.json
// where TOKENS.json holds `input_ids` and `attention_mask`, a row of numbers per sentence, as the tokenizer gives them.

import { readFile } from "node:fs/promises";
import { join } from "node:path";
import * as ort from "onnxruntime-web";

const [bundle, tokensFile] = process.argv.slice(2);

// The weights lie in the bundle's safetensors files; the model says at which places.
const { state } = JSON.parse(await readFile(join(bundle, "bundle.json"), "utf8"));
const files = [...new Set(state.map((entry) => entry.file))];
const externalData = await Promise.all(
  files.map(async (path) => ({ path, data: new Uint8Array(await readFile(join(bundle, path))) })),
);
const model = new Uint8Array(await readFile(join(bundle, "model.onnx")));
const session = await ort.InferenceSession.create(model, { externalData });

const tokens = JSON.parse(await readFile(tokensFile, "utf8"));
const tensor = (rows) =>
  new ort.Tensor("int64", BigInt64Array.from(rows.flat(), BigInt), [rows.length, rows[0].length]);
const { output } = await session.run({
  input_ids: tensor(tokens.input_ids),
  attention_mask: tensor(tokens.attention_mask),
});

const [count, width] = output.dims;
const rows = Array.from({ length: count }, (_, row) => [...output.data.slice(row * width, (row + 1) * width)]);
console.log(JSON.stringify(rows));
process.exit(0); // the library's worker threads would keep the process alive
