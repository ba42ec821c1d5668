// The viewer's page. Texts of a model are only set as textContent.
"use strict";

const PAGE = 50;
const RANGES = ["step", "reward", "tokens", "staleness"];
const GIVEN = -2; // the version of a token that the policy did not sample
const COLOURS = ["none", "logprob", "gap", "entropy", "version", "advantage"];
const at = (id) => document.getElementById(id);
const state = { offset: 0, total: 0, rows: [], chosen: -1, open: null, colour: "none", asked: 0,
  isWhole: false };

async function ask(path) {
  const answer = await fetch(path, { credentials: "omit" });
  if (!answer.ok) throw new Error(`${answer.status}: ${await answer.text()}`);
  return answer.json();
}

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined && text !== null) made.textContent = String(text);
  if (className) made.className = className;
  return made;
}

function number(value) {
  return value === null || value === undefined ? "" : String(Math.round(value * 1000) / 1000);
}

function filter() {
  const wanted = { equals: {}, least: {}, most: {}, search: at("search").value };
  for (const choice of document.querySelectorAll("#facets select")) {
    if (choice.value !== "") wanted.equals[choice.dataset.facet] = JSON.parse(choice.value);
  }
  for (const name of RANGES) {
    for (const side of ["least", "most"]) {
      const given = at(`${name}-${side}`).value;
      if (given !== "") wanted[side][name] = Number(given);
    }
  }
  return wanted;
}

async function showRows() {
  const asked = ++state.asked;
  const query = new URLSearchParams({
    filter: JSON.stringify(filter()), order: at("order").value || "id", offset: state.offset,
    limit: PAGE, falling: at("falling").checked ? "1" : "0",
  });
  try {
    const found = await ask(`api/rows?${query}`);
    if (asked !== state.asked) return; // a later question has been asked
    state.total = found.total;
    state.rows = found.rows;
    at("total").className = "";
    const last = state.offset + found.rows.length;
    at("total").textContent = found.total
      ? `${state.offset + 1} to ${last} of ${found.total} rollouts` : "no rollout fits";
  } catch (error) {
    at("total").className = "error";
    at("total").textContent = error.message;
    return;
  }
  const body = at("rows");
  body.replaceChildren(...state.rows.map((row, place) => {
    const line = document.createElement("tr");
    line.append(
      element("td", row.step ?? row.evaluation), element("td", row.dropped || row.kind),
      element("td", number(row.reward)),
      element("td", row.reason, row.reason === "correct" ? "right" : "wrong"),
      element("td", row.tokens), element("td", number(row.staleness)),
      element("td", row.problem), element("td", row.text),
    );
    line.addEventListener("click", () => choose(place, true));
    return line;
  }));
  choose(state.rows.length ? 0 : -1, false);
}

function choose(place, isOpened) {
  state.chosen = place;
  [...at("rows").children].forEach((line, i) => line.classList.toggle("chosen", i === place));
  const line = at("rows").children[place];
  if (line) line.scrollIntoView({ block: "nearest" });
  if (isOpened && place >= 0) open(state.rows[place].id);
}

async function open(id) {
  try {
    state.open = { id, ...(await ask(`api/rollout/${id}`)) };
  } catch (error) {
    at("total").className = "error";
    at("total").textContent = error.message;
    return;
  }
  const { record, file } = state.open;
  at("detail").hidden = false;
  at("detail").scrollTop = 0;
  const spans = [...new Set(record.versions)].join(", ");
  at("facts").textContent = `${file} | group ${record.group}, index ${record.index} | ` +
    `${record.task} | ${record.reason}, reward ${record.reward === null ? "none" : number(record.reward)} | ` +
    `${record.tokens} tokens, ${record.finish_reason} | versions ${spans} | ${record.generator ?? ""}`;
  at("problem").textContent = record.problem;
  at("answer").textContent = [record.answer, ...(record.other_answers ?? [])].join("\nor ");
  const parts = Object.entries(record.parts).map(([name, value]) => `${name}: ${number(value)}`);
  at("verdict").textContent = [record.reason, ...parts, record.detail ?? ""].join("\n");
  showText();
  showGroup();
}

function showText() {
  const { record, tokens, why_no_tokens } = state.open;
  const text = at("text");
  const isPlain = state.colour === "none";
  const known = tokens && !isPlain ? shades(tokens) : [];
  if (record.conversation && !state.isWhole) {
    text.replaceChildren(...turnsOf(record, tokens, known));
  } else if (!tokens || (isPlain && !tokens.versions.includes(GIVEN))) {
    const [from, to] = thoughts(record.text, record.prompt_tail);
    const dimmed = element("span", record.text.slice(from, to), "thoughts");
    text.replaceChildren(record.text.slice(0, from), dimmed, record.text.slice(to));
  } else {
    text.replaceChildren(...coloured(tokens, known, 0, tokens.texts.length));
  }
  at("colours").textContent = `colour by (c): ${state.colour}${whyNot(tokens, why_no_tokens)}`;
}

// Tokens [from, to); known: the colour of each token, or nothing.
function coloured(tokens, known, from, to) {
  return tokens.texts.slice(from, to).map((piece, place) => {
    const i = from + place;
    const isGiven = tokens.versions[i] === GIVEN;
    const span = element("span", piece, isGiven ? "given" : null);
    span.style.backgroundColor = isGiven ? "transparent" : known[i] ?? "transparent";
    span.title = whatOf(tokens, i);
    return span;
  });
}

// The messages of a conversation, by role; the policy's replies with their tokens.
function turnsOf(record, tokens, known) {
  return record.conversation.flatMap((turn, place) => {
    const versions = record.spans.filter(([, from, to]) => from < turn.end && turn.start < to);
    const said = `policy | reply ${place + 1}, version ${versions.map(([one]) => one).join(", ")}, ` +
      `${turn.end - turn.start} tokens, ${number(turn.asked_s)} to ${number(turn.replied_s)} s`;
    const isNext = turn.follows === place - 1;
    const chat = turn.follows < 0 ? "another chat" : `after reply ${turn.follows + 1}`;
    return [
      ...(isNext ? [] : [element("div", chat, "chat")]),
      ...turn.given.map((one) => message(one.name ? `${one.role} ${one.name}` : one.role, [one.content], "given")),
      message(said, tokens ? coloured(tokens, known, turn.start, turn.end) : [turn.text], "reply"),
    ];
  });
}

function message(label, content, className) {
  const made = element("div", null, className);
  made.append(element("div", label, "role"), ...content);
  return made;
}

// Where the thoughts begin and end; the prompt may open them, and they may not be closed.
function thoughts(text, promptTail) {
  if (!state.tags) return [0, 0];
  const { open, close } = state.tags;
  const opened = text.indexOf(open);
  if (opened < 0 && !promptTail.trimEnd().endsWith(open)) return [0, 0];
  const from = opened < 0 ? 0 : opened + open.length;
  const to = text.indexOf(close, from);
  return [from, to < 0 ? text.length : to];
}

function whyNot(tokens, why) {
  if (!tokens) return ` (tokens: ${why})`;
  const isMissing = ["gap", "entropy"].includes(state.colour) && !tokens.trained;
  return isMissing ? " (not recorded: not trained on, or train.record_tokens = false)" : "";
}

function whatOf(tokens, i) {
  if (tokens.versions[i] === GIVEN) return "given to the policy: no loss";
  const said = `logprob ${tokens.logprobs[i]}, version ${tokens.versions[i]}`;
  const found = tokens.trained;
  if (!found) return said;
  return `${said}, trainer's logprob less the generator's ${found.gaps[i]}, ` +
    `entropy ${found.entropies[i]}, advantage ${found.advantages[i]}`;
}

function signed(value, strength) {
  return value >= 0 ? `rgba(22, 163, 74, ${strength})` : `rgba(220, 38, 38, ${strength})`;
}

function shades(tokens) {
  const found = tokens.trained;
  if (state.colour === "logprob") {
    return tokens.logprobs.map((p) => `rgba(220, 38, 38, ${Math.min(0.8, -p / 5)})`);
  }
  if (state.colour === "gap" && found) {
    return found.gaps.map((gap) => signed(gap, Math.min(0.8, Math.abs(gap) * 2)));
  }
  if (state.colour === "entropy" && found) {
    return found.entropies.map((nats) => `rgba(37, 99, 235, ${Math.min(0.8, nats / 3)})`);
  }
  if (["gap", "entropy"].includes(state.colour)) return tokens.texts.map(() => "transparent");
  if (state.colour === "version") {
    const first = Math.min(...tokens.versions.filter((v) => v !== GIVEN));
    return tokens.versions.map((v) => `hsl(${(210 + 67 * (v - first)) % 360}, 80%, 85%)`);
  }
  const gains = found ? found.advantages : tokens.texts.map(advantage);
  return gains.map((gain) => signed(gain, Math.min(0.6, Math.abs(gain) / 2)));
}

// For untrained rollouts: the reward minus the mean of the group, unscaled.
function advantage() {
  const graded = state.open.group.filter((one) => one.reward !== null);
  const mean = graded.reduce((sum, one) => sum + one.reward, 0) / graded.length;
  return state.open.record.reward === null ? 0 : state.open.record.reward - mean;
}

function showGroup() {
  at("group").replaceChildren(...state.open.group.map((one) => {
    const card = element("div", null, one.id === state.open.id ? "card chosen" : "card");
    card.append(element("div", `${one.idx}: ${one.reason}, ${number(one.reward)}, ${one.tokens} tokens`),
      element("pre", one.text));
    card.addEventListener("click", () => open(one.id));
    return card;
  }));
}

function moveInGroup(by) {
  if (!state.open) return;
  const place = state.open.group.findIndex((one) => one.id === state.open.id) + by;
  if (state.open.group[place]) open(state.open.group[place].id);
}

function turn(by) {
  const offset = state.offset + by * PAGE;
  if (offset >= 0 && offset < state.total) { state.offset = offset; showRows(); }
}

function refilter() { state.offset = 0; showRows(); }

const KEYS = {
  j: () => choose(Math.min(state.chosen + 1, state.rows.length - 1), state.open !== null),
  k: () => choose(Math.max(state.chosen - 1, 0), state.open !== null),
  Enter: () => choose(state.chosen, true),
  Escape: () => { at("detail").hidden = true; state.open = null; },
  n: () => turn(1), p: () => turn(-1), "[": () => moveInGroup(-1), "]": () => moveInGroup(1),
  "/": () => at("search").focus(),
  m: () => { state.isWhole = !state.isWhole; if (state.open) showText(); },
  c: () => {
    state.colour = COLOURS[(COLOURS.indexOf(state.colour) + 1) % COLOURS.length];
    if (state.open) showText();
  },
};

document.addEventListener("keydown", (event) => {
  const isTyping = ["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName);
  if (isTyping && event.key === "Escape") event.target.blur();
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key]) return;
  event.preventDefault();
  KEYS[event.key]();
});

function debounced(work, ms) {
  let waiting;
  return () => { clearTimeout(waiting); waiting = setTimeout(work, ms); };
}

async function begin() {
  const run = await ask("api/run");
  state.tags = run.tags;
  document.title = `${run.name}: rollouts`;
  at("name").textContent = run.name;
  at("order").append(...run.sortable.map((name) => new Option(name, name)));
  for (const [facet, values] of Object.entries(run.facets)) {
    if (values.length < 2) continue;
    const choice = document.createElement("select");
    choice.dataset.facet = facet;
    choice.append(new Option(`${facet}: any`, ""));
    for (const [value, count] of values) {
      const text = value === null || value === "" ? "none" : value;
      choice.append(new Option(`${text} (${count})`, JSON.stringify(String(value ?? ""))));
    }
    choice.addEventListener("change", refilter);
    at("facets").append(choice);
  }
  for (const name of RANGES) {
    for (const side of ["least", "most"]) at(`${name}-${side}`).addEventListener("change", refilter);
  }
  at("search").addEventListener("input", debounced(refilter, 250));
  at("order").addEventListener("change", refilter);
  at("falling").addEventListener("change", refilter);
  at("previous").addEventListener("click", () => turn(-1));
  at("next").addEventListener("click", () => turn(1));
  at("clear").addEventListener("click", () => location.reload());
  await showRows();
}

begin().catch((error) => { at("total").className = "error"; at("total").textContent = error.message; });
