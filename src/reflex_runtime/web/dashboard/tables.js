// The tables: clients, queues, batches as text, and each policy with what its operator may do.
import { aboutBatch, milliseconds, round } from "./strip.js";

function cells(kind, values, texts = new Set([0])) {
  const row = document.createElement("tr");
  values.forEach((value, i) => {
    const cell = document.createElement(kind);
    if (texts.has(i)) cell.className = "text";
    cell.append(value instanceof Node ? value : String(value));
    row.append(cell);
  });
  return row;
}

export function fill(table, heads, rows, texts) {
  table.replaceChildren(cells("th", heads, texts), ...rows.map((row) => cells("td", row, texts)));
}

export function pill(text, kind) {
  return Object.assign(document.createElement("span"), { textContent: text, className: `pill ${kind}` });
}

// The figures of groups that answer callers: a shadow answers nobody.
export function served({ groups, server }) {
  const shadows = new Set(Object.values(server.policies ?? {}).map((policy) => policy.groups?.shadow));
  return groups.filter((g) => !shadows.has(g.name));
}

export function clients(table, known, snapshot) {
  const rows = snapshot.clients.map((c) => [
    c.name, c.group, c.wire, `${round(c.rate)} /s`, milliseconds(c.age), c.answers, milliseconds(c.p95), c.lost, c.why,
  ]);
  fill(table, ["client", "group", "wire", "answers", "last, ago", "answered", "p95", "lost", "why"], rows, new Set([0, 1, 2, 8]));
  known.textContent = snapshot.clients_known > rows.length ? `${rows.length} of ${snapshot.clients_known}, those answered last` : rows.length ? "" : "none yet: they are counted since the first watcher came";
}

export function queues(table, snapshot) {
  const figures = new Map(snapshot.groups.map((g) => [g.name, g]));
  const queues = snapshot.server.queues ?? {};
  const names = new Set([...Object.keys(queues), ...figures.keys()]); // runtime processes have a queue each
  const rows = [...names].map((name) => {
    const q = queues[name];
    const g = figures.get(name);
    const lost = Object.entries(g?.outcomes ?? {}).filter(([kind]) => kind !== "ok").map(([kind, n]) => `${n} ${kind}`).join(", ");
    const waits = q ? [q.queued - q.preparing, q.preparing, q.residents, milliseconds(q.queued_seconds)] : ["–", "–", "–", "–"];
    return [name, ...waits, g ? `${round(g.rate)} /s` : "–", g ? `${Math.round(100 * g.busy)} %` : "–", lost, q?.paused ? "paused" : ""];
  });
  fill(table, ["group", "waiting", "being prepared", "resident", "predicted work", "answers", "busy", "without a result", ""], rows, new Set([0, 7, 8]));
}

export function processes(section, { server }) {
  const found = server.processes ?? [];
  section.hidden = !found.length;
  const kind = (state) => (state === "ready" || state === "running" ? "good" : state === "starting" ? "warn" : "bad");
  fill(section.querySelector("table"), ["process", "state", "pid", "restarts", "memory", "running", "waiting", "why"], found.map((p) => [
    p.name, pill(p.state, kind(p.state)), p.pid ?? "–", p.restarts, p.memory === null ? "–" : `${Math.round(p.memory / 1e6)} MB`, p.running ?? "–", p.waiting ?? "–", p.why,
  ]), new Set([0, 1, 7]));
}

export function batches(table, snapshot) {
  const newest = snapshot.batches.slice(-12).reverse();
  fill(table, ["batch"], newest.map((batch) => [aboutBatch(batch).join(" · ")]));
}

// -- policies ----------------------------------------------------------------------------------------------------------

const BREAKS = { ok: "good", draining: "warn", drained: "bad", probing: "warn", degraded: "bad" };

export class Policies {
  // ask: (path, fields) → the server's answer, or an error.
  constructor(place, ask) {
    this.place = place;
    this.ask = ask;
    this.made = new Map();
  }

  show(server) {
    const policies = server.policies ?? {}, alone = Object.keys(policies).length === 1;
    const buttonsOf = (told) => [alone, told.split !== undefined, ...Object.keys(told.slots)].join();
    for (const [name, { box, buttons }] of this.made) {
      if (!(name in policies) || buttons !== buttonsOf(policies[name])) { // another server has come back at this address
        box.remove();
        this.made.delete(name);
      }
    }
    for (const [name, told] of Object.entries(policies)) {
      if (!this.made.has(name)) this.made.set(name, { ...this.make(name, told, alone), buttons: buttonsOf(told) });
      this.update(this.made.get(name), told);
    }
  }

  make(name, told, alone) {
    const box = document.createElement("div");
    const parts = { box, slots: document.createElement("table"), said: document.createElement("p"), changes: document.createElement("ul"), resets: new Map() };
    parts.changes.className = "changes";
    const wide = Object.assign(document.createElement("div"), { className: "wide" });
    wide.append(parts.slots);
    box.append(Object.assign(document.createElement("h2"), { textContent: alone ? "Policy" : `Policy ${name}` }), parts.said, wide);
    box.append(this.operator(alone ? "" : `/policies/${name}`, told, parts), parts.changes);
    this.place.append(box);
    return parts;
  }

  operator(prefix, told, parts) {
    const row = Object.assign(document.createElement("div"), { className: "operator" });
    const said = Object.assign(document.createElement("span"), { className: "hint" });
    said.setAttribute("role", "status");
    const button = (text, path, fields, question) => {
      const made = Object.assign(document.createElement("button"), { textContent: text });
      made.addEventListener("click", async () => {
        if (question && !confirm(question)) return;
        said.textContent = await this.ask(prefix + path, fields());
      });
      row.append(made);
      return made;
    };
    for (const slot of Object.keys(told.slots)) {
      parts.resets.set(slot, button(`Reset the breaker of ${slot}`, "/admin/reset", () => ({ slot })));
    }
    if (told.split !== undefined) {
      const split = Object.assign(document.createElement("input"), { type: "number", min: 0, max: 100, value: told.split });
      split.setAttribute("aria-label", "percent of new episodes for a");
      parts.split = split;
      row.append(split);
      button("Set a's percent", "/admin/split", () => ({ split: Number(split.value) }));
      button("Roll back to a", "/admin/rollback", () => ({}), "Send everything to a, running episodes too?");
    }
    row.append(said);
    return row;
  }

  update(parts, told) {
    const rows = Object.entries(told.slots).map(([slot, { verdict }]) => {
      const breaker = told.breaker.slots[slot] ?? {}, outcomes = told.outcomes?.[slot];
      const solved = outcomes?.episodes ? `${outcomes.successes} of ${outcomes.episodes} (${percent(outcomes.low)} to ${percent(outcomes.high)})` : "–";
      return [slot, told.versions[slot] ?? "", pill(verdict, BREAKS[verdict] ?? ""), `${breaker.consecutive ?? 0}`, breaker.retry_in_s === null || breaker.retry_in_s === undefined ? "" : `${round(breaker.retry_in_s)} s`, solved, breaker.why ?? ""];
    });
    fill(parts.slots, ["slot", "version", "breaker", "crashes in a row", "probe in", "episodes solved, 95 %", "why"], rows, new Set([0, 1, 2, 5, 6]));
    for (const [slot, made] of parts.resets) made.hidden = told.slots[slot]?.verdict === "ok" && !(told.breaker.slots[slot]?.consecutive); // nothing to reset
    parts.said.textContent = saidOf(told);
    if (parts.split && told.split !== parts.lastSplit) parts.split.value = parts.lastSplit = told.split; // also if another operator sets it
    const changes = (told.changes ?? []).slice(-5).reverse();
    parts.changes.replaceChildren(...changes.map((c) => Object.assign(document.createElement("li"), { textContent: `${round(c.ago_s)} s ago: ${c.kind}: ${c.why}` })));
  }
}

function saidOf(told) {
  const said = [];
  if (told.split !== undefined) said.push(`${told.split} % of new episodes go to a.`);
  const comparison = told.comparison;
  if (comparison) {
    const { a_better: a, b_better: b, not_inferior: level } = comparison.e;
    said.push(`A against B: ${comparison.verdict.replace("_", " is ")}; evidence (decided at ${round(1 / comparison.alpha)}): a better ${round(a)}, b better ${round(b)}, b not worse ${round(level)}; ${comparison.blocks} blocks.`);
  }
  if (told.ramp) said.push(`Ramp: ${told.ramp.state}, b has ${told.ramp.share} %, stage ${told.ramp.stage} of ${told.ramp.shares.length}, ${round(told.ramp.left_s)} s left${told.ramp.held ? ", held" : ""}.`);
  if (told.slo) said.push(`Objective: ${told.slo.violated ? "violated" : "kept"}${told.slo.value_ms === null ? "" : `, ${round(told.slo.value_ms)} ms`}.`);
  return said.join(" ");
}

function percent(share) {
  return `${Math.round(100 * share)} %`;
}
