// The page: choose a model, fill in a call, run it.

import { Latency } from "./latency.js";
import { showTexts, stopTexts } from "./generate.js";
import { curl, python } from "./snippets.js";
import { field, make, output, signature } from "./show.js";
import { range, request, tensorsOf, zeros } from "./tensors.js";

const LOOK_MS = 2000;
const at = (id) => document.getElementById(id);
const url = (path) => new URL(path, document.baseURI).href;
const route = ({ name, version }) => `v2/models/${encodeURIComponent(name)}${version ? `/versions/${version}` : ""}`;

let models = [];
let chosen = null; // { name, version (where there are several), inputs, outputs, fields, latency }

async function json(path, options) {
  const response = await fetch(url(path), options);
  const found = await response.json();
  if (!response.ok) throw new Error(found.error);
  return found;
}

/** Look at the models and the metrics, again and again. */
async function look() {
  try {
    const found = await json("v2/repository/index", { method: "POST", body: "{}" });
    const changed = JSON.stringify(found) !== JSON.stringify(models);
    models = found;
    if (changed) showModels();
    at("unreachable").textContent = models.length ? "" : "The repository holds no model.";
    if (!chosen && models.length) await choose(addressed() || keyOf(models.find(isReady) || models[0]));
    if (chosen?.latency) await showLatency(chosen.latency);
  } catch (error) {
    at("unreachable").textContent = `The server does not answer: ${error.message}`;
  }
  setTimeout(look, LOOK_MS);
}

const isReady = (model) => model.state === "READY";

/** Return how a model is asked for: by its name, and by its version where several are served. */
function keyOf({ name, version }) {
  return models.filter((model) => model.name === name).length > 1 ? { name, version } : { name, version: "" };
}

/** Return the address of a model on the page. */
const address = ({ name, version }) => `#${encodeURIComponent(name)}${version ? `/${version}` : ""}`;
const addressed = () => models.map(keyOf).find((key) => address(key) === location.hash);

const isChosen = (model) => model.name === chosen?.name && keyOf(model).version === chosen.version;

function showModels() {
  const focused = document.activeElement?.dataset?.model;
  at("models").replaceChildren(...models.map((model) => {
    const state = make("span", { class: `state ${model.state}` }, `version ${model.version}, ${model.state.toLowerCase()}`);
    const button = make("button", { type: "button", "data-model": model.name }, model.name, state);
    button.setAttribute("aria-current", String(isChosen(model)));
    button.addEventListener("click", () => choose(keyOf(model)).then(() => {
      // On a phone the model is below the list.
      if (at("title").getBoundingClientRect().top > innerHeight / 2) at("title").scrollIntoView();
    }));
    return make("li", {}, button);
  }));
  if (focused) document.querySelector(`[data-model="${CSS.escape(focused)}"]`)?.focus();
  showAbout();
}

function showAbout() {
  const model = models.find(isChosen);
  if (!model) return;
  at("title").textContent = model.name;
  document.title = `${model.name}: served models`;
  const reason = model.reason ? ` Not served: ${model.reason}` : "";
  at("about").textContent = `Version ${model.version}, ${model.state.toLowerCase()}.${reason}`;
}

/** Show a model, and fill in its form. */
async function choose(key) {
  stopTexts();
  chosen = { ...key };
  history.replaceState(null, "", address(key));
  const { name } = key;
  showModels();
  ["call", "texts", "result", "latency", "code"].forEach((id) => { at(id).hidden = true; });
  at("joining").textContent = at("error").textContent = at("took").textContent = "";
  const own = chosen;
  let metadata;
  try {
    metadata = await json(route(key));
  } catch (error) {
    if (own === chosen) at("about").textContent = `Not served: ${error.message}`;
    return;
  }
  if (own !== chosen) return;
  if (!metadata.outputs.length) {
    at("joining").textContent = "The model generates text, by POST v1/completions and v1/chat/completions.";
    await showTexts(name);
    return;
  }
  const { axes, not_joined: why, classes } = await json(`ui/models/${encodeURIComponent(name)}/about`);
  if (own !== chosen) return;
  at("joining").textContent = axes
    ? `Requests are joined along ${axes.name}, of ${axes.least} to ${axes.most ?? "any number of"} rows.` : `Requests are not joined: ${why}.`;
  Object.assign(chosen, { inputs: metadata.inputs, outputs: metadata.outputs, latency: new Latency(name), classes });
  await fill();
  if (own !== chosen) return;
  ["call", "latency", "code"].forEach((id) => { at(id).hidden = false; });
  await showLatency(own.latency);
}

/** Fill in the arguments of a recorded call. */
async function fill() {
  const own = chosen;
  const response = await fetch(url(`ui/models/${encodeURIComponent(own.name)}/recorded`));
  const recorded = response.ok ? await tensorsOf(response, "inputs") : null;
  if (own !== chosen) return;
  at("filled").textContent = recorded
    ? "Filled in from a call that was recorded at export." : "The bundle holds no recorded call: zeros are filled in.";
  own.fields = own.inputs.map((spec, index) => {
    const tensor = recorded?.find(({ name }) => name === spec.name);
    spec.range = tensor && !["BOOL", "BYTES"].includes(spec.datatype) && tensor.values.length ? range(tensor) : null;
    return field(spec, tensor || zeros(spec), index, (made) => {
      own.fields[index].element.replaceWith(made.element);
      own.fields[index] = made;
      made.element.querySelector("summary").focus();
      showCode();
    });
  });
  at("inputs").replaceChildren(...own.fields.map(({ element }) => element));
  showCode();
}

function showCode() {
  try {
    const tensors = chosen.fields.map(({ read }) => read());
    const { host, protocol } = new URL(document.baseURI);
    at("curl").textContent = curl(url(`${route(chosen)}/infer`), tensors, chosen.outputs);
    at("python").textContent = python(host, protocol === "https:", chosen, tensors, chosen.outputs);
  } catch (error) {
    at("curl").textContent = at("python").textContent = `# ${error.message}`;
  }
}

async function run(event) {
  event.preventDefault();
  at("error").textContent = "";
  chosen.fields.forEach(({ fail }) => fail?.(""));
  at("took").textContent = "Running …";
  at("run").disabled = true;
  const own = chosen;
  try {
    const call = request(own.fields.map(({ read }) => read()));
    const began = performance.now();
    const response = await fetch(url(`${route(own)}/infer`), call);
    if (!response.ok) throw new Error((await response.json()).error);
    const outputs = await tensorsOf(response, "outputs");
    const took = performance.now() - began;
    if (own !== chosen) return;
    at("outputs").replaceChildren(...outputs.map((tensor) => output(tensor, own.classes)));
    at("result").hidden = false;
    at("took").textContent = `Answered in ${took.toFixed(1)} ms: ` +
      outputs.map(({ name, datatype, shape }) => `${name} ${datatype}${signature(shape)}`).join(", ");
  } catch (error) {
    at("took").textContent = "";
    // Sentences about an input begin with its name.
    const wrong = own.fields.find(({ name }) => [`${name}: `, `\`${name}\``].some((begin) => error.message.startsWith(begin)));
    (wrong?.fail || ((text) => { at("error").textContent = text; }))(error.message);
    at("result").hidden = true;
  } finally {
    at("run").disabled = false;
    at("run").focus();
  }
}

async function showLatency(latency) {
  const response = await fetch(url("metrics"), { headers: { Accept: "text/plain" } });
  latency.add(await response.text(), Date.now());
  if (latency === chosen?.latency) latency.show(at("plot"), at("plot-text"), Date.now());
}

async function copy(event) {
  const text = at(event.currentTarget.dataset.copies);
  try {
    await navigator.clipboard.writeText(text.textContent);
    at("copied").textContent = "Copied.";
  } catch { // browsers give no clipboard to pages without TLS
    getSelection().selectAllChildren(text);
    at("copied").textContent = "Selected: copy it by your browser.";
  }
}

at("call").addEventListener("submit", run);
at("call").addEventListener("input", showCode);
at("refill").addEventListener("click", fill);
document.querySelectorAll("[data-copies]").forEach((button) => button.addEventListener("click", copy));
json("v2").then(({ name, version }) => { at("server").textContent = `${name} ${version}`; }).catch(() => {});
addEventListener("hashchange", () => addressed() && choose(addressed()));
look();
