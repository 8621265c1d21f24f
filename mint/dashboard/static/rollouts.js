// Groups of a step, and one group token by token. Everything shown passes through Vue's escaping or mint.escape.
const MODES = {
  advantage: { name: "Advantage", why: "How much the update was told to make this token likelier (green) or rarer (red)." },
  logprob: { name: "Log-prob", why: "How surprising the token was to the model that sampled it." },
  ratio: { name: "Ratio", why: "Probability under the trainer divided by that under the sampler; 1 where both agree." },
  kl: { name: "KL", why: "Log-prob under the policy minus that under the reference: how far training has moved it." },
};
const SHOWN_TOKENS = 1500;
const MINUS = "−";
const fmt = (x) => window.mint.number(x);
const signed = (x) => (x > 0 ? "+" : "") + fmt(x);

function value(sample, i, mode) {
  if (!sample.mask[i]) return null;
  if (mode === "advantage") return sample.advantages ? sample.advantages[i] : sample.advantage;
  if (mode === "logprob") return sample.logprobs[i];
  if (mode === "ratio") return sample.train ? Math.exp(sample.train[i] - sample.logprobs[i]) : null;
  return sample.reference ? sample.logprobs[i] - sample.reference[i] : null;
}

function reach(group, mode) {
  let most = { advantage: 1e-9, logprob: 3, ratio: 0.02, kl: 0.2 }[mode];
  for (const sample of group.samples)
    for (let i = 0; i < sample.mask.length; i++) {
      const x = value(sample, i, mode);
      if (x === null || x === undefined || !Number.isFinite(x)) continue;
      most = Math.max(most, mode === "ratio" ? Math.abs(Math.log(x)) : Math.abs(x));
    }
  return mode === "logprob" ? Math.min(most, 8) : mode === "kl" ? Math.min(most, 4) : most;
}

const rgba = (rgb, a) => `rgba(${rgb},${a.toFixed(3)})`;
const RED = "229,72,77", GREEN = "18,163,127", VIOLET = "139,92,246", BLUE = "59,130,246", ORANGE = "240,130,30";
function tint(x, most, mode) {
  if (x === null || x === undefined || !Number.isFinite(x)) return "";
  const part = Math.min((mode === "ratio" ? Math.abs(Math.log(x)) : Math.abs(x)) / most, 1);
  if (part < 0.004) return "";
  const strength = 0.08 + 0.6 * Math.pow(part, 0.8);
  if (mode === "logprob") return rgba(VIOLET, strength);
  if (mode === "advantage") return rgba(x > 0 ? GREEN : RED, strength);
  const up = mode === "ratio" ? x > 1 : x > 0;
  return rgba(up ? ORANGE : BLUE, strength);
}

function rewardColor(reward, low, high) {
  const x = high > low ? (reward - low) / (high - low) : reward > 0 ? 1 : 0;
  return `hsl(${Math.round(2 + 158 * x)} 62% ${Math.round(52 - 6 * x)}%)`;
}

export default {
  template: `
  <div class="rollouts">
    <aside class="card groups">
      <div class="tools">
        <input ref="search" class="field grow" type="search" placeholder="Search text  /" :value="query" @input="search($event.target.value)" @keydown.escape="$event.target.blur()" aria-label="Search in prompts and completions of this step">
        <select class="field" v-model="order" aria-label="Order of groups">
          <option value="number">in order</option><option value="best">best first</option><option value="worst">worst first</option><option value="spread">most signal</option>
        </select>
      </div>
      <div class="list" ref="list">
        <button v-for="g in ordered" :key="g.n" class="groupline" :class="{here: group && g.n === group.n}" @click="open(g.n)">
          <span class="top"><b>{{ g.n }}</b><span class="dots"><i v-for="(r, i) in g.rewards.slice(0, 16)" :key="i" :style="{background: rewardColor(r)}"></i></span>
          <span class="mean" :title="'mean reward of ' + g.rewards.length + ' samples'">{{ fmt(g.mean) }}</span></span>
          <div class="prompt">{{ g.prompt }}</div>
        </button>
        <div v-if="!ordered.length" class="empty"><p>Nothing in this step holds “{{ query }}”.</p></div>
      </div>
      <div class="foot">{{ ordered.length }} groups · each bar one sample, <span :style="{color: rewardColor(low)}">low</span> to <span :style="{color: rewardColor(high)}">high</span> reward</div>
    </aside>
    <section class="card viewer" v-if="group">
      <div class="head">
        <div class="line">
          <span class="switch" role="group" aria-label="Colour tokens by">
            <button v-for="(m, key, i) in modes" :key="key" :class="{here: key === mode}" :disabled="!has[key]" :title="has[key] ? m.why + '  (key ' + (i + 1) + ')' : missing[key]" @click="mode = key">{{ m.name }}</button>
          </span>
          <span class="scale" v-if="has[mode]"><span>{{ scale[0] }}</span><span class="ramp" :style="{background: scale[2]}"></span><span>{{ scale[1] }}</span></span>
          <span style="margin-left:auto" class="flow">
            <span class="switch"><button @click="pick(0)" title="The sample with the highest reward (b)">Best</button><button @click="pick(group.samples.length - 1)" title="The sample with the lowest reward (w)">Worst</button></span>
            <span class="switch"><button @click="near(-1)" title="Previous group (k or ↑)" aria-label="Previous group">◂</button><button @click="near(1)" title="Next group (j or ↓)" aria-label="Next group">▸</button></span>
            <button class="plain" @click="one = !one" :title="one ? 'All samples side by side (Enter)' : 'One sample at full width (Enter)'">{{ one ? 'All' : 'One' }}</button>
            <button class="plain" @click="helping = true" title="Keys (?)">?</button>
          </span>
        </div>
        <div class="promptbox" title="The prompt, the same for all samples of the group">{{ group.prompt }}</div>
        <div class="line muted" style="font-size:12.5px">
          <span>Group {{ group.n }} · {{ group.samples.length }} samples<span v-if="group.omitted"> (of {{ group.samples.length + group.omitted }}, the best and the worst)</span> · mean reward {{ fmt(group.mean) }} · prompt {{ group.prompt_tokens }} tokens · sampled by policy {{ group.version }} at temperature {{ fmt(group.temperature) }}</span>
          <a v-if="group.problem_link" :href="group.problem_link" class="chip">history of this prompt</a>
        </div>
      </div>
      <div class="samples" :class="{one: one || group.samples.length === 1}" ref="samples" @mouseover="hover" @mouseleave="leave" @scroll="leave">
        <article v-for="(s, k) in group.samples" v-show="!one || k === selected" :key="group.n + '/' + s.member" class="rollout" :class="{here: k === selected}" @click="selected = k">
          <header>
            <span class="reward" :style="{color: rewardColor(s.reward)}" title="Reward">{{ fmt(s.reward) }}</span>
            <span v-if="s.advantage !== null" title="Advantage: reward compared with the rest of the group">adv {{ signed(s.advantage) }}</span>
            <span class="end"><span class="faint" title="Sampled tokens">{{ s.tokens }} tok</span><span class="chip" :class="cut(s.stop)" :title="'How it ended: ' + s.stop">{{ s.stop || 'no end' }}</span><span class="faint" title="Number of the sample in its group">#{{ s.member }}</span></span>
          </header>
          <div class="tokens"><template v-for="(part, p) in parts(s, k)" :key="p"><span v-if="part.label" class="turn">{{ part.label }}</span><span v-for="t in part.tokens" :key="t.i" class="t" :class="t.cls" :style="t.style" :data-k="k" :data-i="t.i">{{ t.text }}</span></template><span v-if="!s.pieces.length" class="faint">(empty: the model stopped at once)</span></div>
          <footer v-if="s.terms.length || s.calls.length || !s.trained || s.pieces.length > limit">
            <button v-if="s.pieces.length > limit && !all[k]" class="plain" @click.stop="all = {...all, [k]: true}">Show all {{ s.pieces.length }} tokens</button>
            <div v-for="(c, n) in s.calls" :key="n" class="call">{{ c }}</div>
            <span v-if="s.answer !== null">expected <b class="mono">{{ s.answer }}</b></span>
            <span v-for="[name, x] in s.terms" :key="name" :class="{faint: x === 0}">{{ name }} <b>{{ fmt(x) }}</b></span>
            <span v-if="!s.trained && s.advantage !== null" title="Filtered out, masked, or without an advantage">not trained on</span>
          </footer>
        </article>
      </div>
    </section>
    <section v-else class="card empty"><p>Choose a group on the left.</p></section>
    <div ref="tip" class="tip" hidden></div>
    <div v-if="helping" class="help" @click="helping = false"><div><h2>Keys among rollouts</h2><dl>
      <dt><kbd>j</kbd> <kbd>k</kbd> or <kbd>↓</kbd> <kbd>↑</kbd></dt><dd>next, previous group</dd>
      <dt><kbd>→</kbd> <kbd>←</kbd> or <kbd>l</kbd> <kbd>h</kbd></dt><dd>next, previous sample</dd>
      <dt><kbd>b</kbd> <kbd>w</kbd></dt><dd>best, worst sample of the group</dd>
      <dt><kbd>]</kbd> <kbd>[</kbd></dt><dd>next, previous step</dd>
      <dt><kbd>1</kbd> … <kbd>4</kbd></dt><dd>colour by advantage, log-prob, ratio, KL</dd>
      <dt><kbd>Enter</kbd></dt><dd>one sample, or all side by side</dd>
      <dt><kbd>/</kbd></dt><dd>search in text</dd><dt><kbd>t</kbd></dt><dd>light or dark</dd><dt><kbd>Esc</kbd></dt><dd>close</dd></dl></div></div>
  </div>`,
  props: { groups: Array, group: Object, query: String, low: Number, high: Number },
  emits: ["open", "search", "go"],
  data() {
    return { mode: sessionStorage.getItem("mint.mode") || "advantage", order: "number", selected: 0, one: false, helping: false, all: {}, modes: MODES, limit: SHOWN_TOKENS };
  },
  computed: {
    ordered() {
      const spread = (g) => Math.max(...g.rewards) - Math.min(...g.rewards);
      const by = { number: (a, b) => a.n - b.n, best: (a, b) => b.mean - a.mean, worst: (a, b) => a.mean - b.mean, spread: (a, b) => spread(b) - spread(a) };
      return [...this.groups].sort(by[this.order]);
    },
    has() {
      const some = (key) => this.group.samples.some((s) => s[key]);
      return { advantage: some("advantages") || this.group.samples.some((s) => s.advantage !== null), logprob: true, ratio: some("train"), kl: some("reference") };
    },
    missing() {
      return {
        advantage: "An evaluation has no advantages.",
        ratio: "No sample of this group was trained on, so the trainer did not score it.",
        kl: "Nothing was compared with a reference: the run has no KL term (kl_penalty_coef, kl_reference_config), or this group was not trained on.",
      };
    },
    most() { return reach(this.group, this.mode); },
    scale() {
      const m = this.most;
      const ramp = (from, to) => `linear-gradient(90deg, ${rgba(from, 0.68)}, transparent 50%, ${rgba(to, 0.68)})`;
      if (this.mode === "advantage") return [MINUS + fmt(m), "+" + fmt(m), ramp(RED, GREEN)];
      if (this.mode === "logprob") return ["certain", MINUS + fmt(m) + " (p " + fmt(Math.exp(-m)) + ")", `linear-gradient(90deg, transparent, ${rgba(VIOLET, 0.68)})`];
      if (this.mode === "ratio") return ["×" + fmt(Math.exp(-m)), "×" + fmt(Math.exp(m)), ramp(BLUE, ORANGE)];
      return [MINUS + fmt(m) + " rarer", "+" + fmt(m) + " likelier", ramp(BLUE, ORANGE)];
    },
  },
  watch: {
    mode(mode) { sessionStorage.setItem("mint.mode", mode); },
    group: { immediate: true, handler(group, before) {
      if (!group) return;
      if (!before || before.n !== group.n || before.step !== group.step) { this.selected = group.selected || 0; this.all = {}; }
      if (!this.has[this.mode]) this.mode = this.has.advantage ? "advantage" : "logprob";
      this.leave();
      this.$nextTick(() => { this.$refs.list?.querySelector(".here")?.scrollIntoView({ block: "nearest" }); this.show(); });
    } },
  },
  mounted() { document.addEventListener("keydown", this.key); },
  unmounted() { document.removeEventListener("keydown", this.key); },
  methods: {
    fmt, signed,
    rewardColor(reward) { return rewardColor(reward, this.low, this.high); },
    cut(stop) { return /max_|overflow|timeout|error/.test(stop || "") ? "warning" : ""; },
    open(n) { this.$emit("open", { group: n }); },
    near(by) {
      const at = this.ordered.findIndex((g) => this.group && g.n === this.group.n);
      const next = this.ordered[at < 0 ? 0 : at + by];
      if (next) this.open(next.n); else this.$emit("go", { by });
    },
    pick(k) { this.selected = k; this.$nextTick(this.show); },
    show() { this.$refs.samples?.children[this.selected]?.scrollIntoView({ block: "nearest" }); },
    search(query) { clearTimeout(this.waiting); this.waiting = setTimeout(() => this.$emit("search", { query }), 180); },
    hits(sample) {
      const query = (this.query || "").toLowerCase(), found = new Set();
      if (!query) return found;
      const text = sample.pieces.join("").toLowerCase();
      const starts = []; let length = 0;
      for (const piece of sample.pieces) { starts.push(length); length += piece.length; }
      for (let at = text.indexOf(query); at >= 0; at = text.indexOf(query, at + 1))
        for (let i = 0; i < starts.length; i++)
          if (starts[i] < at + query.length && starts[i] + sample.pieces[i].length > at) found.add(i);
      return found;
    },
    parts(sample, k) {
      const end = this.all[k] ? sample.pieces.length : Math.min(sample.pieces.length, SHOWN_TOKENS);
      const found = this.hits(sample), several = sample.turns.length > 1;
      const result = []; let part = null, mask = null, turn = 0;
      for (let i = 0; i < end; i++) {
        if (part === null || (several && sample.mask[i] !== mask)) {
          mask = sample.mask[i];
          part = { label: several ? (mask ? `model, turn ${++turn}` : "environment") : "", tokens: [] };
          result.push(part);
        }
        const x = value(sample, i, this.mode), color = tint(x, this.most, this.mode), piece = sample.pieces[i];
        part.tokens.push({ i, text: piece.replace(/\n/g, "↵\n"), cls: (mask || !several && sample.mask[i] ? "" : "env ") + (found.has(i) ? "hit" : ""), style: color ? { background: color } : null });
      }
      return result;
    },
    hover(event) {
      const token = event.target.closest?.(".t"), tip = this.$refs.tip;
      if (!token) return this.leave();
      const s = this.group.samples[+token.dataset.k], i = +token.dataset.i, row = (key, name, text) => text === null ? "" : `<div class="f ${key === this.mode ? "here" : ""}"><span>${name}</span><b>${text}</b></div>`;
      const e = window.mint.escape, p = s.logprobs[i];
      let body = `<div class="piece">${e(JSON.stringify(s.pieces[i]))}<span>id ${e(s.ids[i])} · ${i + 1} of ${s.pieces.length}</span></div>`;
      if (!s.mask[i]) body += `<div class="muted">Written by the environment, not trained on.</div>`;
      else {
        const advantage = value(s, i, "advantage");
        body += row("advantage", "advantage", advantage === null || advantage === undefined ? null : signed(advantage));
        body += row("logprob", "log-prob (sampler)", `${fmt(p)}  ·  p ${fmt(Math.exp(p))}`);
        if (s.train) body += row("", "log-prob (trainer)", fmt(s.train[i])) + row("ratio", "ratio", value(s, i, "ratio").toFixed(5));
        if (s.reference) body += row("", "log-prob (reference)", fmt(s.reference[i])) + row("kl", "KL term", signed(value(s, i, "kl")));
      }
      tip.innerHTML = body; tip.hidden = false;
      const at = token.getClientRects()[0], box = tip.getBoundingClientRect();
      tip.style.left = `${Math.max(8, Math.min(at.left, innerWidth - box.width - 12))}px`;
      tip.style.top = at.bottom + box.height + 14 > innerHeight ? `${at.top - box.height - 8}px` : `${at.bottom + 8}px`;
    },
    leave() { if (this.$refs.tip) this.$refs.tip.hidden = true; },
    key(e) {
      if (e.ctrlKey || e.metaKey || e.altKey || /^(INPUT|TEXTAREA|SELECT)$/.test(e.target.tagName)) return;
      const n = this.group ? this.group.samples.length : 0;
      const actions = {
        j: () => this.near(1), k: () => this.near(-1), ArrowDown: () => this.near(1), ArrowUp: () => this.near(-1),
        ArrowRight: () => this.pick(Math.min(this.selected + 1, n - 1)), ArrowLeft: () => this.pick(Math.max(this.selected - 1, 0)),
        l: () => this.pick(Math.min(this.selected + 1, n - 1)), h: () => this.pick(Math.max(this.selected - 1, 0)),
        b: () => this.pick(0), w: () => this.pick(n - 1), Enter: () => { this.one = !this.one; },
        "]": () => this.$emit("go", { by: 1 }), "[": () => this.$emit("go", { by: -1 }),
        "/": () => this.$refs.search.focus(), "?": () => { this.helping = !this.helping; }, Escape: () => { this.helping = false; this.leave(); },
      };
      Object.keys(MODES).forEach((mode, i) => { actions[String(i + 1)] = () => { if (this.group && this.has[mode]) this.mode = mode; }; });
      if (e.key in actions) { e.preventDefault(); actions[e.key](); }
    },
  },
};
