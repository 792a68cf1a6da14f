// The page: its data, its parts, and how it is kept up to date.

const $ = (id) => document.getElementById(id);
const nonce = document.currentScript.nonce;
const runs = [];
let chosen = 0, part = "overview";

// Text of a run is only ever a text node, and what cannot be seen, or turns the direction of text, is spelled out.
const HIDDEN = /[\p{Cf}\p{Cs}\p{Co}\p{Zl}\p{Zp}\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\u{e0100}-\u{e01ef}]|(?![\n\t])\p{Cc}/gu;
const spell = (sign) => `⟨U+${sign.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`;
const visible = (text) => String(text).replace(HIDDEN, spell);
function visibleNodes(text) {
  text = String(text);
  const signs = text.match(HIDDEN);
  return signs ? text.split(HIDDEN).flatMap((piece, i) => [piece, ...(signs[i] ? [Object.assign(document.createElement("span"), { className: "ctl", textContent: spell(signs[i]) })] : [])]) : [text];
}

function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node[name] = true;
    else if (value !== false) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child != null && child !== false).flatMap((child) => (child instanceof Node ? [child] : visibleNodes(child))));
  return node;
}
const list = (pairs) => el("dl", {}, ...pairs.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value instanceof Node ? value : show(value)))));
const grid = (heads, rows) => el("div", { class: "sheet" }, el("table", {}, el("thead", {}, el("tr", {}, ...heads.map((head) => el("th", { scope: "col" }, head)))),
  el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map((cell) => (cell?.tagName === "TD" ? cell : el("td", {}, cell ?? ""))))))));
const number = (value) => (typeof value !== "number" ? "–" : Number.isInteger(value) ? value.toLocaleString("en") : Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6 ? value.toExponential(2) : Number(value.toPrecision(4)).toLocaleString("en", { maximumSignificantDigits: 4 }));
const show = (value) => (typeof value === "number" ? number(value) : typeof value === "string" ? value : JSON.stringify(value) ?? "");
const duration = (s) => (s >= 5400 ? `${(s / 3600).toFixed(1)} h` : s >= 90 ? `${(s / 60).toFixed(1)} min` : `${s.toFixed(1)} s`);

async function unpack(text) {
  const signs = atob(text), bytes = new Uint8Array(signs.length);
  for (let i = 0; i < signs.length; i++) bytes[i] = signs.charCodeAt(i);
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}
const records = (text) => text.split("\n").filter(Boolean).map((line) => JSON.parse(line)).sort((a, b) => a.step - b.step);
let plotly; // its script takes a second or two: it is run once a chart comes into view and the text is painted
const painted = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
const library = () => plotly ??= painted().then(() => unpack($("plotly").textContent)).then((code) => document.head.append(Object.assign(document.createElement("script"), { nonce, textContent: code })));
const rolloutsOf = (run) => run.rollouts ??= unpack(run.samples).then(records);
const evaluatedOf = (run) => run.evaluated ??= unpack(run.evaluations).then((text) => records(text).flatMap((r) => (r.completions ?? []).map((one) => ({
  step: r.step, group_id: `${r.set}:${r.row}`, row: `${r.set}:${r.row}`, reward: one.score, finish_reason: one.finish_reason, num_tokens: one.num_tokens, versions: one.versions,
  context: [{ role: "prompt", text: show(r.prompt) }, { role: "model", text: one.text, num_tokens: one.num_tokens }] }))));

const PARTS = { // what each tab holds
  compare: () => compare(),
  overview: (run) => [el("h2", {}, "What to change"), advice(run), el("h2", {}, "How it went"), el("div", { class: "grid" }, waits(run) ?? "", ...chartsOf(run, "curves", (options) => options.main))],
  time: (run) => [el("div", { class: "grid" }, trainer(run) ?? "", waits(run) ?? "", ...servers(run), ...chartsOf(run, "time"))],
  curves: (run) => [run.core.header.steps > run.core.points && el("p", { class: "soft" }, `A curve of more than ${number(run.core.points)} steps shows the least and the greatest value of each interval.`), any(run), el("div", { class: "grid" }, ...chartsOf(run, "curves"))],
  rollouts: async (run) => browser(await rolloutsOf(run), left(run.core.kept.samples, "samples.jsonl"), "Completions"),
  evaluation: async (run) => [el("div", { class: "grid" }, ...chartsOf(run, "evaluation")), el("h2", {}, "Samples"), ...browser(await evaluatedOf(run), left(run.core.kept.evaluations, "evaluation_samples.jsonl"), "Evaluated completions")],
  settings: (run) => settings(run),
  log: (run) => log(run),
};
const left = (kept, file) => `${file} has ${number(kept.of)} records of ${number(kept.of_steps)} steps. This page holds ${number(kept.kept)} of them, of ${number(kept.steps)} steps`
  + (kept.kept < kept.of ? ": the first, the last, and steps between, with whole groups. --steps FIRST-LAST chooses others." : ".") + (kept.damaged ? ` ${number(kept.damaged)} damaged lines were left out.` : "");

function advice(run) {
  const { advisories } = run.core, id = `advice-${runs.indexOf(run)}`;
  if (!advisories.length) return el("p", { id }, "Nothing stands out.");
  return el("ol", { class: "advice", id }, ...advisories.map((one) => {
    const where = CHARTS.find((chart) => chart[0] === one.chart)?.[1] ?? "time";
    return el("li", {}, el("b", { class: "warn" }, one.id), `: ${one.text} · `, one.change && el("span", {}, "Change: ", el("code", {}, one.change), " · "), el("a", { href: `#${where}/${one.chart}`, onclick: () => choose(runs.indexOf(run)) }, "chart"));
  }));
}
const SHOWN = ["share of time", "seconds a step"];
function stack(run, id, title, parts) {
  if (!Object.keys(parts(run.core.shares)).length) return null;
  return figure(id, title, (choice) => (choice === SHOWN[1] ? "seconds" : "% of the time"), (choice) => stacked(run.core.shares, parts(run.core.shares), choice !== SHOWN[1]),
    { wide: true, choices: SHOWN, caption: () => `${shareText(run.core.shares, parts(run.core.shares))} of the time (docs/metrics.md explains the names)`, zero: true });
}
const shareText = (shares, parts) => {
  const sums = Object.entries(parts).map(([name, y]) => [name, y.reduce((a, b) => a + (b ?? 0), 0)]), whole = timeOf(shares, parts).reduce((a, b) => a + b, 0);
  return whole ? sums.sort((a, b) => b[1] - a[1]).slice(0, 4).map(([name, sum]) => `${name.replace(/_/g, " ")} ${(100 * sum / whole).toFixed(0)} %`).join(", ") : "nothing";
};
const trainer = (run) => stack(run, "trainer", "What the training thread did", (shares) => shares.trainer);
const waits = (run) => stack(run, "waits", "What the trainer waited for", (shares) => shares.waits);
function servers(run) {
  const order = Object.keys(WHAT), rank = (kind) => (kind in WHAT ? order.indexOf(kind) : order.length);
  const kinds = [...new Set(Object.values(run.core.shares.servers).flatMap(Object.keys))].sort((a, b) => rank(a) - rank(b));
  if (!kinds.length) return [];
  return [figure("lanes", "Servers over time", "", (kind) => lanes(run, kind ?? kinds[0]), { wide: true, choices: kinds, caption: () => "colour: share of the time, or the number; lag: versions behind the trainer" })];
}
function any(run) {
  const options = Object.keys(run.core.series).sort(), names = el("datalist", { id: "metrics" }, ...options.map((name) => el("option", { value: name })));
  const place = el("div", {}), input = el("input", { class: "long", list: "metrics", onchange: () => {
    const name = options.includes(input.value) ? input.value : options.find((one) => one.includes(input.value));
    place.replaceChildren(name ? figure("any", name, "", () => curves(run, [name.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")], {}), { wide: true }) : "No metric has this in its name.");
  } });
  return el("div", {}, el("div", { class: "filters" }, el("label", {}, "Any metric", input)), names, place);
}
function settings(run) {
  const all = run.core.settings, differing = all.filter(([, , , usual]) => usual != null), start = run.core.starts.at(-1) ?? {};
  const rows = (some) => some.map(([table, key, value, usual]) => [`${table}.${key}`, el("code", {}, value), usual == null ? "" : el("code", {}, usual)]);
  const body = el("div", { class: "scroll" }), input = el("input", { class: "long", oninput: () => fill() });
  const fill = () => body.replaceChildren(grid(["setting", "value", "default, if it differs"], rows(all.filter((row) => row.join(" ").includes(input.value)))));
  fill();
  const environment = ["host", "devices", "num_ranks", "commit", "platform", "python", "folder", "packages", "servers", "arguments"].filter((key) => start[key] != null);
  return [el("h2", {}, `Settings that differ from their defaults: ${differing.length}`), grid(["setting", "value", "default"], rows(differing)), el("h2", {}, "Environment of the last start"),
    grid(["what", "value"], environment.map((key) => [key, el("code", {}, show(start[key]))])), el("h2", {}, `All settings: ${all.length}`), el("div", { class: "filters" }, el("label", {}, "Filter", input)), body];
}
function log(run) {
  const { events, starts, last, num_events: all, dropped, damaged } = run.core, guards = Object.entries(last).filter(([key]) => key.startsWith("guards/"));
  return [el("h2", {}, "Warnings and errors"), el("p", { class: "soft" }, all > events.length ? `${number(events.length)} of ${number(all)}: the first and the last ones.` : `${number(all)} in all.`),
    events.length > 0 && el("div", { class: "scroll", tabindex: "0" }, grid(["step", "time", "level", "text"], events.map((one) => [show(one.step), one.time ? new Date(one.time * 1000).toISOString().slice(0, 19).replace("T", " ") : "", one.level, el("span", { class: "text" }, one.text)]))),
    el("h2", {}, "Guards, since the last start"), list(guards.map(([key, value]) => [key.slice(7), value])), ...(Object.keys(dropped).length ? [el("h2", {}, "Dropped"), list(Object.entries(dropped))] : []),
    el("h2", {}, "Starts"), grid(["start", "first step", "time", "host", "settings that changed"], starts.map((one) => [one.number, one.first_step, one.started, one.host, Object.entries(one.changed).map(([k, v]) => `${k} = ${v}`).join("; ")])),
    damaged ? el("p", { class: "warn" }, `${number(damaged)} damaged lines of metrics were left out.`) : null];
}

// Two or more runs: their numbers, their curves over steps or seconds, and the settings in which they differ.
const JUDGED = [["reward/mean", "higher"], ["evaluation/score", "higher"], ["time/step_seconds", "lower"], ["time/trained_tokens_per_second", "higher"], ["time/wait_data_fraction", "lower"],
  ["rollout/length_fraction", "lower"], ["reward/equal_groups_fraction", "lower"], ["mismatch/kl", "lower"], ["staleness/mean_steps", "lower"], ["policy/entropy", ""], ["rollout/completion_tokens_mean", ""]];
const UNFAIR = { "reward/mean": /^(reward|environments)\.(.+\.)?(functions|weights|unscorable_value|kind|model|template|score|options|path)$|^prompts\.(path|name|split|column|weights|template|system_prompt)$|^agent\.function$/,
  "evaluation/score": /^evaluation\.(.+\.)?(path|name|split|function|num_prompts|temperature|environment)$/ }; // settings that change what it means
function at(curve, x) { // the last value at or before x
  let low = 0, high = curve.x.length;
  while (low < high) { const middle = (low + high) >> 1; if (curve.x[middle] <= x) low = middle + 1; else high = middle; }
  return curve.y[Math.max(0, low - 1)];
}
const seconds = (run, step) => at(run.ticks ??= points(run.core.clock), step);
function reached(run, level) { // when the mean of five points of the reward first reached a level
  const curve = points(run.core.series["reward/mean"] ?? { x: [], y: [] });
  const i = curve.y.findIndex((_, j) => j >= 4 && curve.y.slice(j - 4, j + 1).reduce((a, b) => a + (b ?? 0), 0) / 5 >= level);
  return i < 0 ? null : seconds(run, curve.x[i]);
}
function compare() {
  const names = runs.map((run) => run.core.header.name), level = Math.min(...runs.map((run) => run.core.late["reward/mean"] ?? Infinity));
  const line = (name, values, better) => {
    const known = values.filter((value) => typeof value === "number"), best = better === "lower" ? Math.min(...known) : Math.max(...known);
    return [name + (better ? ` (${better} is better)` : ""), ...values.map((value) => el("td", { class: better && value === best && new Set(known).size > 1 ? "best" : "" }, number(value)))];
  };
  const tables = runs.map((run) => Object.fromEntries(run.core.settings.map(([table, key, value]) => [`${table}.${key}`, value])));
  const differing = [...new Set(tables.flatMap(Object.keys))].filter((key) => new Set(tables.map((table) => table[key])).size > 1);
  const isUnfair = (key) => differing.some((setting) => UNFAIR[key]?.test(setting)), hasRisen = level > Math.max(...runs.map((run) => run.core.header.reward_first ?? Infinity));
  const rows = [line("steps", runs.map((run) => run.core.header.steps), ""), line("seconds", runs.map((run) => run.core.header.seconds), ""),
    ...JUDGED.map(([key, better]) => line(isUnfair(key) ? `${key} (settings differ: not comparable)` : key, runs.map((run) => run.core.late[key] ?? run.core.last[key] ?? null), isUnfair(key) ? "" : better)),
    ...(Number.isFinite(level) && hasRisen && !isUnfair("reward/mean") ? [line(`seconds until the reward reached ${number(level)}`, runs.map((run) => reached(run, level * (1 - 1e-6))), "lower")] : [])];
  const overlaid = (key, title) => figure(`both-${key}`, title, "", (choice) => runs.flatMap((run, i) => curves(run, [key], { clock: choice === "by seconds" && seconds }, names[i], i)), { choices: ["by step", "by seconds"], caption: () => "", x: "" });
  return [el("h2", {}, "Numbers; of a metric, the mean of the last fifth of a run"), grid(["", ...names], rows),
    el("div", { class: "grid" }, ...[["reward/mean", "Reward"], ["evaluation/score", "Evaluation"], ["rollout/completion_tokens_mean", "Length"], ["policy/entropy", "Entropy"], ["time/trained_tokens_per_second", "Trained tokens a second"], ["mismatch/kl", "Mismatch"]]
      .filter(([key]) => runs.some((run) => run.core.series[key])).map(([key, title]) => overlaid(key, title))),
    el("h2", {}, `Settings that differ between the runs: ${differing.length}`), el("div", { class: "scroll" }, grid(["setting", ...names], differing.map((key) => [key, ...tables.map((table) => el("code", {}, table[key] ?? "–"))]))),
    ...runs.flatMap((run, i) => [el("h2", {}, `What to change in ${names[i]}`), advice(run)])];
}

function header(run) {
  const { header: head } = run.core, dash = (a, b) => `${number(a)} → ${number(b)}`;
  $("name").replaceChildren(...visibleNodes(runs.length > 1 ? runs.map((one) => one.core.header.name).join(" and ") : head.name));
  document.title = visible($("name").textContent);
  $("head").replaceChildren(...list([["run", head.description || head.name], ["model", head.model], ["state", head.state], ["steps", number(head.steps) + (head.of_steps ? ` of ${number(head.of_steps)}` : "")],
    ["reward, first and last fifth", dash(head.reward_first, head.reward_last)], ...(head.score_first == null ? [] : [["first and last evaluation", dash(head.score_first, head.score_last)]]), ["duration", duration(head.seconds)], ["started", head.started]]).childNodes);
}
function choose(i) {
  chosen = i;
  $("run").value = i;
  header(runs[i]);
}
async function open(name, chart) {
  part = Object.hasOwn(PARTS, name) ? name : "overview";
  for (const tab of $("tabs").children) {
    tab.setAttribute("aria-selected", tab.id === `tab-${part}`);
    tab.tabIndex = tab.id === `tab-${part}` ? 0 : -1;
  }
  $("main").setAttribute("aria-labelledby", `tab-${part}`);
  const wanted = part, content = (await PARTS[part](runs[chosen])).filter(Boolean);
  if (wanted !== part) return;
  $("main").replaceChildren(...content);
  const target = chart && $(`chart-${chart}`);
  if (target) { target.scrollIntoView(); target.focus(); } else scrollTo(0, 0);
}
const follows = () => { const [name, chart] = location.hash.slice(1).split("/"); return open(name || (runs.length > 1 ? "compare" : "overview"), chart); };
function tabs() {
  const names = Object.keys(PARTS).filter((name) => name !== "compare" || runs.length > 1);
  $("tabs").replaceChildren(...names.map((name) => el("button", { role: "tab", id: `tab-${name}`, "aria-controls": "main", onclick: () => { if (location.hash === `#${name}`) follows(); else location.hash = name; } }, name[0].toUpperCase() + name.slice(1))));
  $("tabs").addEventListener("keydown", (event) => {
    const all = [...$("tabs").children], i = all.indexOf(event.target), to = { ArrowRight: i + 1, ArrowLeft: i - 1, Home: 0, End: all.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    all[(to + all.length) % all.length].focus();
    all[(to + all.length) % all.length].click();
  });
}
function colours() {
  const dark = matchMedia("(prefers-color-scheme: dark)"), set = () => { document.documentElement.dataset.mode = $("mode").value || (dark.matches ? "dark" : "light"); redraw(); };
  dark.addEventListener("change", set);
  $("mode").addEventListener("change", set);
  set();
}
async function watch() { // asks for what is new; completions and tables are renewed when their part is opened again
  const answer = await fetch("data", { headers: { "If-None-Match": watch.tag ?? "" } }).catch(() => null);
  $("facts").textContent = answer ? `Live: ${new Date().toLocaleTimeString()}` : "The server of this page does not answer.";
  if (answer?.status === 200) {
    watch.tag = answer.headers.get("ETag");
    const packed = await answer.json();
    for (const [i, run] of packed.entries()) Object.assign(runs[i], run, { core: JSON.parse(await unpack(run.core)), rollouts: null, evaluated: null, ticks: null });
    header(runs[chosen]);
    runs.forEach((run, i) => $(`advice-${i}`)?.replaceWith(advice(run)));
    redraw();
  }
  setTimeout(watch, Number(document.body.dataset.watch) * 1000);
}
async function begin() {
  for (let i = 0, core; (core = $(`core-${i}`)); i++) runs.push({ core: JSON.parse(await unpack(core.textContent)), samples: $(`samples-${i}`).textContent, evaluations: $(`evaluations-${i}`).textContent });
  $("run").replaceChildren(...runs.map((run, i) => el("option", { value: i }, run.core.header.name)));
  $("pick").hidden = runs.length < 2;
  $("run").addEventListener("change", () => { choose(Number($("run").value)); follows(); });
  colours();
  tabs();
  header(runs[chosen]);
  addEventListener("hashchange", follows);
  await follows();
  if (document.body.dataset.watch) watch();
}
begin().catch((error) => { $("facts").textContent = `This page cannot be shown: ${error}`; console.error(error); });
