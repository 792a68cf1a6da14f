// Rollouts: filters, a list, and one completion with its group and the same prompt in other steps.

const SHADES = { // how a token's number becomes a colour: [red, green, blue, strength from 0 to 1]
  logprob: [(v) => [224, 123, 26, Math.min(1, -v / 6)], "0", "−6 or less: unlikely when sampled"],
  ratio: [(v) => [...(v > 1 ? [224, 123, 26] : [47, 126, 216]), Math.min(1, Math.abs(Math.log(v)) * 3)], "1: as likely for the trainer as when sampled", "far from 1; blue below, orange above"],
  advantage: [(v) => [...(v < 0 ? [224, 123, 26] : [47, 126, 216]), Math.min(1, Math.abs(v) / 2)], "0", "±2 or more; orange below 0, blue above"],
  trained: [(v) => [42, 157, 98, v ? 0.45 : 0], "not trained (underlined)", "trained"],
};
const shade = (mode, value) => { const [r, g, b, a] = SHADES[mode][0](value); return `rgba(${r},${g},${b},${0.55 * a})`; };

const textOf = (record) => record.haystack ??= [...(record.context ?? []).map((part) => part?.text ?? ""), ...Object.values(record.columns ?? {}).map(show)].join("\n").toLowerCase();
const written = (record) => (record.context ?? []).filter((part) => part?.role !== "prompt").map((part) => part?.text ?? "").join(" ");
const lengthOf = (record) => record.num_tokens ??= (record.context ?? []).reduce((sum, part) => sum + (part?.role === "model" ? part.num_tokens ?? 0 : 0), 0);
const span = (text) => { const [a, b = a] = text.split(/\s*[-:–]\s*/).map((word) => (word === "" ? NaN : Number(word))); return [a, b]; };
const within = (text, value) => { if (!text.trim()) return true; const [a, b] = span(text); return (a === a || b === b) && !(value < a) && !(value > b) && value != null; };

const MOST = 4000; // tokens of a completion in the page, as reading.py has it

const FILTERS = [ // [label, class, hint, test]
  ["Text", "long", "in prompt, completion or columns", (record, word) => textOf(record).includes(word.toLowerCase())],
  ["Step", "", "12 or 10-20", (record, word) => within(word, record.step)],
  ["Prompt", "", "7", (record, word) => within(word, record.number)],
  ["Reward", "", "0.5-1", (record, word) => within(word, record.reward)],
  ["Tokens", "", "100-500", (record, word) => within(word, lengthOf(record))],
  ["File or row", "", "train.jsonl:8", (record, word) => String(record.row ?? "").includes(word)],
];

function browser(records, about, label) {
  const list = el("ul", { class: "list", "aria-label": label }), detail = el("div", { tabindex: "-1", class: "detail" });
  const count = el("p", { role: "status", class: "soft" }), inputs = FILTERS.map(([, kind, hint]) => el("input", { class: kind, placeholder: hint, oninput: () => later() }));
  const reasons = [...new Set(records.map((record) => String(record.finish_reason)))].sort();
  const reason = el("select", { onchange: () => refresh() }, el("option", { value: "" }, "any"), ...reasons.map((one) => el("option", { value: one }, one)));
  const order = el("select", { onchange: () => refresh() }, ...["step", "lowest reward", "highest reward", "longest"].map((one) => el("option", {}, one)));
  const ORDERS = { step: () => 0, "lowest reward": (a, b) => (a.reward ?? 9e9) - (b.reward ?? 9e9),
    "highest reward": (a, b) => (b.reward ?? -9e9) - (a.reward ?? -9e9), longest: (a, b) => lengthOf(b) - lengthOf(a) };
  const buttons = new Map();
  let timer, found = [], shown = 100, marked;
  const later = () => { clearTimeout(timer); timer = setTimeout(refresh, 120); };
  function refresh() {
    clearTimeout(timer);
    const active = FILTERS.map((filter, i) => [filter[3], inputs[i].value.trim()]).filter(([, word]) => word);
    found = records.filter((record) => active.every(([test, word]) => test(record, word)) && (!reason.value || String(record.finish_reason) === reason.value));
    if (order.value !== "step") found.sort(ORDERS[order.value]);
    shown = 100;
    render();
  }
  function render(focused = -1) {
    count.replaceChildren(`${number(found.length)} of ${number(records.length)} in this page. ${found.length ? "" : missing()}`);
    const more = el("li", {}, el("button", { onclick: () => { shown += 200; render(shown - 200); } }, `${number(found.length - shown)} more`));
    list.replaceChildren(...found.slice(0, shown).map(row), ...(found.length > shown ? [more] : []));
    list.children[focused]?.firstChild.focus();
  }
  const missing = () => {
    const [step] = span(inputs[1].value), steps = [...new Set(records.map((record) => record.step))];
    const near = steps.sort((a, b) => Math.abs(a - step) - Math.abs(b - step)).slice(0, 4).sort((a, b) => a - b);
    return !(step >= 0) || steps.includes(step) ? "Loosen a filter." : `Step ${step} is not in this page; the nearest are ${near.join(", ")}. A report with --steps ${step} has it, if the file has it.`;
  };
  const row = (record) => buttons.get(record) ?? buttons.set(record, el("li", {}, el("button", { onclick: () => open(record) }, `step ${record.step} · ${record.number != null ? `prompt ${record.number}` : record.row} · `, el("b", {}, record.reward == null ? "no reward" : number(record.reward)),
  ` · ${lengthOf(record)} tokens · ${record.finish_reason}`, el("span", { class: "text" }, written(record).slice(0, 160))))).get(record);
  function open(record, mode) {
    marked?.removeAttribute("aria-current");
    marked = row(record).firstChild;
    marked.setAttribute("aria-current", "true");
    const group = records.filter((other) => other.step === record.step && other.group_id === record.group_id);
    const same = records.filter((other) => other.row != null && other.row === record.row);
    detail.replaceChildren(...completion(record, group, same, open, mode).filter(Boolean));
    detail.focus();
  }
  const fields = FILTERS.map(([name], i) => el("label", {}, name, inputs[i]));
  refresh();
  return [el("p", { class: "soft" }, about), el("form", { class: "filters", onsubmit: (event) => { event.preventDefault(); refresh(); list.querySelector("button")?.focus(); } },
    ...fields, el("label", {}, "Ended by", reason), el("label", {}, "Order", order), el("button", {}, "Filter")), count, el("div", { class: "split" }, list, detail)];
}

function completion(record, group, same, open, mode) {
  const modes = Object.keys(SHADES).filter((name) => name === "trained" || values(record, name));
  mode = modes.includes(mode) ? mode : modes[0];
  const choose = el("select", { onchange: () => { open(record, choose.value); document.querySelector(".detail select").focus(); } }, ...modes.map((name) => el("option", { selected: name === mode }, name)));
  const facts = Object.entries({ reward: record.reward, ...record.reward_components, advantage: record.advantage, unscored: record.unscored || null,
    "left out": record.left_out || null, row: record.row, versions: (record.versions ?? []).map((one) => [one].flat()[0]).join(", "), server: record.server,
    "lowest log-probability": values(record, "logprob") && Math.min(...record.tokens.logprob.filter((value) => value != null)), ...record.columns, ...prefixed("logged ", record.logged) }).filter(([, value]) => value != null && value !== "");
  const [, low, high] = SHADES[mode];
  const legend = el("span", {}, " ", el("span", { class: "key", style: `background:${shade(mode, { logprob: 0, ratio: 1, advantage: 0, trained: 0 }[mode])}` }, low),
    el("span", { class: "key", style: `background:${shade(mode, { logprob: -6, ratio: 1.5, advantage: -2, trained: 1 }[mode])}` }, high));
  const readout = el("p", { class: "readout soft", "aria-live": "polite" }, record.tokens ? "Point at a token, or focus the text and use the arrow keys." : "This record has no tokens.");
  const others = group.length > 1 ? [el("h2", {}, `All ${group.length} completions of this prompt in step ${record.step}`), el("div", { class: "columns" }, ...group.map((other, i) => el("div", { tabindex: "0", role: "group", "aria-label": `completion ${i + 1}` },
    el("button", { onclick: () => open(other, mode), disabled: other === record }, other === record ? "shown above" : "open"),
    ` ${i + 1}: `, el("b", {}, number(other.reward)), other.advantage == null ? "" : ` · advantage ${number(other.advantage)}`, ` · ${lengthOf(other)} tokens · ${other.finish_reason}`,
    ...conversation(other, mode, false))))] : [];
  const steps = new Map(same.map((other) => [`${other.step} ${other.group_id}`, []]));
  same.forEach((other) => steps.get(`${other.step} ${other.group_id}`).push(other));
  const over = steps.size > 1 ? [el("h2", {}, "The same prompt over the steps"), el("div", { class: "scroll" }, grid(["step", "mean reward", "completion with the highest reward"],
    [...steps.values()].map((all) => {
      const best = all.reduce((a, b) => ((b.reward ?? -9e9) > (a.reward ?? -9e9) ? b : a));
      return [el("button", { onclick: () => open(best, mode) }, `step ${best.step}`), number(all.reduce((sum, one) => sum + (one.reward ?? 0), 0) / all.length), written(best).slice(0, 300)];
    })))] : [];
  return [el("h2", {}, `Step ${record.step}, ${record.number != null ? `prompt ${record.number}` : record.row}, completion ${group.indexOf(record) + 1} of ${group.length}`),
    list(facts), record.tokens && el("p", {}, el("label", {}, "Colour tokens by ", choose), legend), readout, ...conversation(record, mode, readout), ...others, ...over];
}

const prefixed = (word, object) => Object.fromEntries(Object.entries(object ?? {}).map(([key, value]) => [word + key, value]));

function values(record, mode) {
  const held = record.tokens?.[mode];
  return Array.isArray(held) && Array.isArray(record.tokens.text) && held.some((value) => value != null) ? held : null;
}

function conversation(record, mode, readout) { // the parts of the context, with a span for each token
  let place = 0;
  const tokens = Array.isArray(record.tokens?.text) ? record.tokens.text : [];
  const parts = (record.context ?? []).filter((part) => part && typeof part === "object");
  const rest = parts.slice(parts[0]?.role === "prompt" ? 1 : 0), whole = rest.reduce((sum, part) => sum + (part.num_tokens ?? 0), 0);
  const isWhole = tokens.length > 0 && (whole === tokens.length || (whole > MOST && tokens.length === MOST));
  return (readout === false ? rest : parts).map((part, i) => {
    const text = el("div", { class: "text", dir: "auto" }), isFirst = readout !== false && i === 0 && part.role === "prompt";
    if (isWhole && !isFirst && place < tokens.length) {
      text.append(...tokens.slice(place, place + part.num_tokens).map((word, j) => token(record, mode, word, place + j)));
      place += part.num_tokens;
      if (place > tokens.length) text.append(` … (of a completion, the page has ${number(MOST)} tokens)`);
      if (readout) follow(text, readout, record);
    } else {
      text.append(...visibleNodes(part.text ?? ""));
      if (mode === "advantage" && part.trained && record.advantage != null) text.style.background = shade(mode, record.advantage);
    }
    return el("div", { class: `turn ${part.role === "model" ? "model" : ""}` }, el("span", { class: "soft" }, `${part.role}${part.num_tokens == null ? "" : `, ${part.num_tokens} tokens`}${part.trained ? ", trained" : ""}`), text);
  });
}

function token(record, mode, word, place) {
  const value = values(record, mode)?.[place], node = el("span", { class: record.tokens.trained?.[place] === 0 ? "t off" : "t" });
  node.append(...visibleNodes(word));
  node.dataset.place = place;
  if (value != null) node.style.background = shade(mode, value);
  return node;
}

function follow(text, readout, record) { // one stop of the Tab key; arrows move from token to token
  const say = (node) => {
    const place = Number(node.dataset.place), told = Object.keys(SHADES).filter((name) => values(record, name)).map((name) => `${name} ${number(values(record, name)[place])}`);
    readout.replaceChildren(`token ${place + 1}: `, el("code", {}, JSON.stringify(visible(record.tokens.text[place]))), ` · ${told.join(" · ")}`);
  };
  if (text.firstElementChild) text.firstElementChild.tabIndex = 0;
  for (const name of ["mouseover", "focusin"]) text.addEventListener(name, (event) => { const node = event.target.closest(".t"); if (node) say(node); });
  text.addEventListener("keydown", (event) => {
    const move = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling", Home: "first", End: "last" }[event.key], from = event.target.closest(".t");
    const to = from && { first: text.firstElementChild, last: text.lastElementChild }[move] || from?.[move];
    if (!move || !to) return;
    event.preventDefault();
    from.tabIndex = -1;
    to.tabIndex = 0;
    to.focus();
  });
}
