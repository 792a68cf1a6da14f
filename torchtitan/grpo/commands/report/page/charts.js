// Charts: a table of them, and the functions that draw one with Plotly.

// [id, part, title, unit, patterns of metrics, options]
const CHARTS = [
  ["reward", "curves", "Reward", "reward", ["reward/mean"], { spread: true, main: true }],
  ["components", "curves", "Reward functions", "reward, unweighted", ["reward/(?!mean$|std$|equal|logged/)[^/]+", "reward/file/.+"]],
  ["logged", "curves", "Logged by reward functions", "", ["reward/logged/.+"]],
  ["equal", "curves", "Groups with equal rewards", "fraction", ["reward/equal_groups_fraction", "data/filtered_groups_fraction"], { main: true }],
  ["length", "curves", "Length of completions", "tokens", ["rollout/completion_tokens_(mean|min|max)"], { main: true }],
  ["cut", "curves", "Cut and unscored completions", "fraction", ["rollout/(length|unscored|unscorable)_fraction"]],
  ["entropy", "curves", "Entropy", "nats a token", ["policy/entropy", "policy/nll"], { main: true }],
  ["mismatch", "curves", "Mismatch of trainer and servers", "nats a token", ["mismatch/kl"], { log: true }],
  ["weights", "curves", "Effective samples, clipped and masked tokens", "fraction",
    ["mismatch/(effective_sample_size|capped_fraction|masked_fraction|rejected_fraction)", "loss/clipped_fraction"]],
  ["staleness", "curves", "Age of samples", "batches", ["staleness/(mean|max)_steps"]],
  ["gradient", "curves", "Norm of the gradient", "norm", ["(critic/)?grad_norm"], { log: true }],
  ["lr", "curves", "Learning rate", "", ["(critic/)?lr"], { zero: true }],
  ["loss", "curves", "Loss", "", ["loss/(total|policy|ptx|reference_kl)"]],
  ["throughput", "curves", "Throughput", "tokens a second", ["time/trained_tokens_per_second", "(rollout|time)/tokens_per_second"], { main: true }],
  ["dropped", "curves", "Dropped and failed", "count since the batch before",
    ["rollout/(unscored_by_.+|(failed|unscored|expired|overdue|filtered)_groups|failed_requests|rewards_.+|requests_.+)"], { some: true }],
  ["score", "evaluation", "Score", "score", ["evaluation/(.+/)?score"], { points: true }],
  ["pass", "evaluation", "pass@k", "probability", ["evaluation/.+/pass_at_.+"], { points: true }],
  ["evaluated", "evaluation", "Length and cut completions", "tokens; fraction", ["evaluation/.+/(length_mean|cut_fraction)"], { points: true }],
  ["seconds", "time", "Duration of a step", "seconds", ["time/step_seconds", "time/(wait_data|boundary_stall)_seconds"]],
  ["pushes", "time", "Pushes of weights", "seconds; count", ["weight_sync/push_seconds", "weight_sync/(pause_seconds|failures|lost_servers)"]],
];
const WHAT = { // how a server's colour is read, and the colour of 0
  generating: 1, prefill: 1, paused: 1, idle: 1, lost: 1, asleep: 1, starting: 1, kv_use: 1,
};
const COLOURS = ["#2f7ed8", "#e07b1a", "#2a9d62", "#c8415b", "#8465c9", "#9a6a3f", "#d667ad", "#7d8794", "#a3a51d",
  "#1aa6b7", "#5a6fb0", "#b5533c", "#4f8f2f"];
const STYLES = ["solid", "dash", "dot", "dashdot"];

const plain = (text) => visible(text).replace(/&/g, "&amp;").replace(/</g, "&lt;"); // Plotly reads tags in labels
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function points(curve) { // steps are stored as differences
  let step = 0;
  return { x: curve.x.map((d) => (step += d)), y: curve.y };
}

function layout(unit, options = {}) {
  const axis = { gridcolor: css("--line"), zerolinecolor: css("--line"), linecolor: css("--line"), automargin: true };
  return {
    margin: { l: 8, r: 8, t: 6, b: 8 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: css("--text"), size: 11, family: "system-ui, sans-serif" }, uirevision: "kept", hovermode: "x unified",
    hoverlabel: { bgcolor: css("--back"), font: { color: css("--text") }, namelength: 40 },
    legend: { orientation: "h", y: -0.22, font: { size: 11 } }, colorway: COLOURS,
    xaxis: { ...axis, title: { text: options.x ?? "step", standoff: 4 } },
    yaxis: { ...axis, title: { text: unit, standoff: 4 }, type: options.log ? "log" : "linear", exponentformat: "e", rangemode: options.zero ? "tozero" : "normal" },
  };
}

function curves(run, patterns, options, name = "", number = 0) {
  const all = Object.keys(run.core.series);
  let keys = [...new Set(patterns.flatMap((pattern) => all.filter((key) => new RegExp(`^(${pattern})$`).test(key))))];
  if (options.some) keys = keys.filter((key) => run.core.series[key].y.some(Boolean));
  const twins = new Map(); // equal curves: one would hide the other
  for (const key of keys) {
    const same = JSON.stringify(run.core.series[key]);
    twins.set(same, [...(twins.get(same) ?? []), key]);
  }
  return [...twins.values()].slice(0, 12).map(([key, ...others], i) => {
    const { x, y } = points(run.core.series[key]);
    const few = options.points || y.length < 40;
    return { x: options.clock ? x.map((step) => options.clock(run, step)) : x, y, name: plain(name ? `${name}: ${key}` : [key, ...others].join(" = ")),
      mode: few ? "lines+markers" : "lines", connectgaps: false, marker: { size: 4 },
      line: { width: 1.4, color: COLOURS[(name ? number : i) % COLOURS.length], dash: STYLES[(name ? i : 0) % 4] } };
  });
}

function spreadOf(run) { // bands behind the reward: one standard deviation, and the groups of the samples
  const { series, spread } = run.core;
  const band = (x, low, high, name, colour) => [
    { x, y: low, mode: "lines", line: { width: 0 }, showlegend: false, hoverinfo: "skip" },
    { x, y: high, mode: "lines", line: { width: 0 }, fill: "tonexty", fillcolor: colour, name, hoverinfo: "skip" }];
  const found = [];
  if (series["reward/mean"] && series["reward/std"]) {
    const mean = points(series["reward/mean"]), deviation = points(series["reward/std"]);
    const at = new Map(mean.x.map((step, i) => [step, mean.y[i]]));
    const both = deviation.x.map((step, i) => [step, at.get(step), deviation.y[i]]).filter(([, m, d]) => m != null && d != null);
    found.push(...band(both.map((b) => b[0]), both.map((b) => b[1] - b[2]), both.map((b) => b[1] + b[2]),
      "all rewards: ± 1 standard deviation", "rgba(47,126,216,.16)"));
  }
  for (const [key, name] of [["low", "lowest group"], ["high", "highest group"]]) {
    if (spread[key].x.length) found.push({ ...points(spread[key]), name: `${name} of the samples`, mode: "lines", line: { width: .8, color: css("--soft"), dash: "dot" } });
  }
  return found;
}

function timeOf(shares, parts) { // of each bucket; waits are parts of the steps, to which the start does not belong
  const counted = Object.entries(shares.trainer).filter(([name]) => name !== "start" || parts.start).map(([, y]) => y);
  return shares.x.map((_, i) => counted.reduce((sum, y) => sum + (y[i] ?? 0), 0));
}

function stacked(shares, parts, relative) {
  const total = (name) => parts[name].reduce((sum, value) => sum + (value ?? 0), 0);
  const names = Object.keys(parts).filter(total).sort((a, b) => total(b) - total(a));
  const whole = timeOf(shares, parts);
  const scaled = (y) => (relative ? y.map((value, i) => (whole[i] ? 100 * value / whole[i] : 0)) : y);
  return names.map((name, i) => ({ x: shares.x, y: scaled(parts[name]), name: plain(name.replace(/_/g, " ")), stackgroup: "one",
    mode: "lines", line: { width: .5, color: COLOURS[i % COLOURS.length], shape: "hvh" },
    hovertemplate: relative ? "%{y:.1f} %" : "%{y:.3f} s" }));
}

function lanes(run, what) { // a row for each server, and its state as colour over time
  const { servers, x } = run.core.shares, names = Object.keys(servers).filter((name) => servers[name][what]);
  const top = WHAT[what] ?? Math.max(1, ...names.flatMap((name) => servers[name][what]));
  return [{ type: "heatmap", x, y: names.map(plain), z: names.map((name) => servers[name][what]), zmin: 0, zmax: top,
    colorscale: [[0, css("--panel")], [1, css("--accent")]], colorbar: { thickness: 10, outlinewidth: 0 }, hoverongaps: false,
    customdata: names.map((name) => x.map((_, i) => Object.entries(servers[name]).map(([k, v]) => `${k} ${number(v[i])}`).join("<br>"))),
    hovertemplate: "%{y}, step %{x}<br>%{customdata}<extra></extra>" }];
}

// A figure that is drawn when it comes into view. `traces` returns what to draw; `choices` are options of a select.
function figure(id, title, unit, traces, options = {}) {
  const plot = el("div", { class: "plot" }), table = el("div", { class: "scroll" });
  const choice = options.choices && el("select", { "aria-label": `${title}: what is shown`, onchange: () => draw() },
    ...options.choices.map((name) => el("option", { value: name }, name.replace(/_/g, " "))));
  const now = () => traces(choice?.value);
  const caption = el("span", { class: "soft" }), told = (found) => caption.replaceChildren(options.caption?.() ?? range(found[0]));
  const values = el("details", { ontoggle: () => values.open && table.replaceChildren(numbers(now())) }, el("summary", {}, "Numbers"), table);
  const node = el("figure", { id: `chart-${id}`, class: options.wide ? "wide" : "", tabindex: "-1" },
    el("figcaption", {}, el("b", {}, title), choice, caption), plot, values);
  const draw = () => inTurn(async () => {
    await library();
    const form = layout(typeof unit === "function" ? unit(choice?.value) : unit, options), found = now();
    told(found);
    if (found[0]?.type === "heatmap") Object.assign(form, { hovermode: "closest", yaxis: { ...form.yaxis, type: "category", title: {} } });
    await Plotly.react(plot, found, form, { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] });
    window.firstChart ??= performance.now();
  });
  node.draw = draw;
  told(now());
  seen.observe(node);
  return node;
}
let queue = Promise.resolve(); // one chart at a time, and the page can be used between them
const inTurn = (task) => queue = queue.then(task).catch(console.error).then(() => new Promise((done) => setTimeout(done)));
const seen = new IntersectionObserver((entries) => entries.forEach((entry) => {
  if (entry.isIntersecting) { seen.unobserve(entry.target); entry.target.isDrawn = true; entry.target.draw(); }
}), { rootMargin: "150px" });
const redraw = () => document.querySelectorAll("figure").forEach((node) => node.isDrawn && node.draw());

function range(trace) {
  const known = (trace?.y ?? []).filter((value) => typeof value === "number");
  if (!known.length) return "no values";
  const [least, most] = known.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
  return `${trace.name}: first ${number(known[0])}, last ${number(known.at(-1))}, least ${number(least)}, most ${number(most)}`;
}

function numbers(traces) { // at most 40 rows of what a chart shows, for readers without it
  const shown = traces.filter((trace) => trace.name && trace.y);
  const x = traces[0]?.x ?? [], rows = x.filter((_, i) => i % Math.ceil(x.length / 40) === 0);
  const columns = traces[0]?.type === "heatmap" ? traces[0].y.map((name, i) => [name, x, traces[0].z[i]]) : shown.map((t) => [t.name, t.x, t.y]);
  const places = columns.map(([, steps]) => new Map(steps.map((step, i) => [step, i])));
  return grid(["step", ...columns.map((column) => column[0])],
    rows.map((step) => [step, ...columns.map(([, , y], i) => number(y[places[i].get(step)]))]));
}

function chartsOf(run, part, only = () => true) {
  const found = CHARTS.filter((chart) => chart[1] === part && only(chart[5] ?? {})).map(([id, , title, unit, patterns, options = {}]) => {
    const traces = () => [...curves(run, patterns, options), ...(options.spread ? spreadOf(run) : [])];
    return traces().length ? figure(id, title, unit, traces, options) : null;
  });
  return found.filter(Boolean);
}
