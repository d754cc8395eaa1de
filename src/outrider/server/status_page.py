"""The page at ``/``: what the server is doing, readable at a glance, live.

Owns one self-contained HTML text: no network assets, nothing but ``/status.json`` is fetched, and
everything is put into the page as text.
"""

from __future__ import annotations

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Outrider</title>
<style>
  :root { color-scheme: light dark; --soft: color-mix(in srgb, currentColor 12%, transparent);
          --accent: #2f7d5b; }
  body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto;
         padding: 0 1rem; }
  h1 { font-size: 1.4rem; margin: 0; }
  h2 { font-size: 1rem; margin: 2rem 0 .5rem; }
  #state { padding: .1rem .6rem; border-radius: 1rem; background: var(--accent); color: white;
           font-size: .85rem; margin-left: .6rem; }
  #state.bad { background: #a33; }
  .sub { opacity: .7; overflow-wrap: anywhere; }
  .tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(10.5rem, 1fr));
           gap: .7rem; margin-top: 1.2rem; }
  .tile { border: 1px solid var(--soft); border-radius: .5rem; padding: .6rem .8rem; }
  .tile b { display: block; font-size: 1.5rem; font-variant-numeric: tabular-nums; }
  .tile span { opacity: .7; font-size: .85rem; }
  .bar { display: flex; height: 1.4rem; border-radius: .3rem; overflow: hidden;
         background: var(--soft); }
  .bar div { min-width: 0; }
  .key { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; font-size: .85rem; margin-top: .4rem; }
  .key i { display: inline-block; width: .8rem; height: .8rem; border-radius: .2rem;
           margin-right: .35rem; vertical-align: -.08rem; }
  table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
  td, th { padding: .15rem .9rem .15rem 0; text-align: right; font-weight: normal; }
  th { opacity: .7; }
</style>
</head>
<body>
<header>
  <h1>Outrider <span id="model"></span><span id="state">connecting</span></h1>
  <div class="sub" id="fingerprint"></div>
</header>
<main>
  <div class="tiles" id="tiles"></div>
  <h2>Where step time goes</h2>
  <div class="bar" id="bar"></div>
  <div class="key" id="key"></div>
  <h2>Drafted tokens that were accepted, by place in the draft</h2>
  <table id="depths"></table>
</main>
<script>
"use strict";
const PERIOD_MS = 1000;
const COLOURS = {prefill: "#7a6bb0", draft: "#d08a2e", verify: "#2f7d5b", rest: "#8a8f98"};
let last = null;

function element(tag, text, parent) {
  const made = document.createElement(tag);
  if (text !== null) made.textContent = text;
  parent.append(made);
  return made;
}
function number(value) { return value.toLocaleString("en", {maximumFractionDigits: 2}); }
function percent(value) { return (100 * value).toFixed(0) + " %"; }
function duration(seconds) {
  const hours = Math.floor(seconds / 3600), minutes = Math.floor(seconds / 60) % 60;
  return hours ? `${hours} h ${minutes} min` : minutes ? `${minutes} min`
                                             : `${Math.floor(seconds)} s`;
}
function rate(now) {
  if (!last || now.emitted_tokens < last.emitted_tokens) return 0;
  const passed = now.uptime_s - last.uptime_s;
  return passed > 0 ? (now.emitted_tokens - last.emitted_tokens) / passed : 0;
}
function show(now) {
  const state = document.getElementById("state");
  state.textContent = now.state;
  state.className = now.state === "ready" ? "" : "bad";
  document.getElementById("model").textContent = now.model;
  document.getElementById("fingerprint").textContent =
    `${now.fingerprint} · ${now.method}${now.drafting_off ? " (off after faults)" : ""}` +
    ` · up ${duration(now.uptime_s)}`;
  const tiles = document.getElementById("tiles");
  tiles.replaceChildren();
  const drafts = now.speculation;
  for (const [value, name] of [
    [number(rate(now)), "tokens per second"],
    [`${now.running + now.prefilling} / ${now.max_batch_size}`, "requests in the batch"],
    [number(now.waiting), "requests waiting"],
    [percent(now.slots_used / now.slots_total), "of the cache in use"],
    [drafts.acceptance_length.toFixed(2), "tokens per verify step"],
    [percent(drafts.acceptance_rate), "of drafted tokens accepted"],
    [number(now.emitted_tokens), "tokens written"],
    [number(now.prefix_hit_tokens), "prompt tokens reused"],
    [number(now.finished), "requests finished"],
    [number(now.refused), "refused, queue full"],
    [number(now.aborted), "aborted"],
    [number(now.failed), "failed"],
  ]) {
    const tile = element("div", null, tiles);
    tile.className = "tile";
    element("b", value, tile);
    element("span", name, tile);
  }
  const bar = document.getElementById("bar"), key = document.getElementById("key");
  bar.replaceChildren();
  key.replaceChildren();
  const total = Object.values(now.step_s).reduce((sum, value) => sum + value, 0) || 1;
  for (const [part, seconds] of Object.entries(now.step_s)) {
    const piece = element("div", null, bar);
    piece.style.background = COLOURS[part];
    piece.style.width = `${100 * seconds / total}%`;
    const entry = element("span", null, key);
    element("i", null, entry).style.background = COLOURS[part];
    entry.append(`${part} ${percent(seconds / total)}`);
  }
  const depths = document.getElementById("depths");
  depths.replaceChildren();
  const places = element("tr", null, depths), rates = element("tr", null, depths);
  drafts.accepted_at.forEach((count, depth) => {
    element("th", String(depth + 1), places);
    element("td", percent(count / drafts.steps), rates);
  });
  if (!drafts.accepted_at.length) element("td", "none yet", rates);
}
async function poll() {
  try {
    const answer = await fetch("status.json", {cache: "no-store"});
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const now = await answer.json();
    show(now);
    last = now;
  } catch (problem) {
    const state = document.getElementById("state");
    state.textContent = "unreachable";
    state.className = "bad";
  }
  setTimeout(poll, PERIOD_MS);
}
poll();
</script>
</body>
</html>
"""
