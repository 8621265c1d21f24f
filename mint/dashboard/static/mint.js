// What every page shares: number formats, chart tooltips and clicks, the theme, the keys of the page.
window.mint = (() => {
  const escape = (text) =>
    String(text).replace(/[&<>"']/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" })[c]);

  function number(value) {
    if (value === null || value === undefined) return "–";
    if (!Number.isFinite(value)) return "not finite";
    if (Number.isInteger(value) && Math.abs(value) < 1e6) return String(value).replace("-", "−");
    const size = Math.abs(value);
    const text = size >= 1e6 || size < 1e-3 ? value.toExponential(2) : value.toPrecision(3);
    return text.replace("e+", "e").replace(/-/g, "−");
  }

  function short(value) {
    const size = Math.abs(value);
    if (value === 0) return "0";
    if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`.replace("-", "−");
    if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`.replace("-", "−");
    if (size < 1e-3) return value.toExponential(0).replace("-", "−").replace("-", "−");
    return String(+value.toPrecision(7)).replace("-", "−");
  }

  function tooltip(points) {
    const shown = (Array.isArray(points) ? points : [points]).filter((p) => !/ \((low|band)\)$/.test(p.seriesName));
    if (!shown.length) return "";
    const rows = shown
      .map((p) => {
        const measured = / \(measured\)$/.test(p.seriesName);
        const name = escape(p.seriesName);
        return `<tr><td><i style="background:${escape(p.color)};opacity:${measured ? 0.35 : 1}"></i>${name}</td><td class="v">${number(p.value[1])}</td></tr>`;
      })
      .join("");
    const marks = (tooltip.marks || []).filter((m) => m[0] === shown[0].value[0]).map((m) => `<div>${escape(m[1])}</div>`);
    return `<b>Step ${shown[0].value[0]}</b><table>${rows}</table>${marks.join("")}`;
  }

  // A click anywhere in a chart opens the step under the pointer.
  function chart(id, target, group) {
    const attach = (tries) => {
      const element = typeof getElement === "function" ? getElement(id) : null;
      const drawn = element && element.chart;
      if (!drawn) return tries > 0 && setTimeout(() => attach(tries - 1), 50);
      const others = window.mint.connected;
      if (group && !others.includes(drawn)) {
        others.push(drawn);
        follow(drawn, others);
      }
      if (!target || drawn.mintOpens) return;
      drawn.mintOpens = true;
      const zr = drawn.getZr();
      zr.on("mousemove", (e) => zr.setCursorStyle(drawn.containPixel("grid", [e.offsetX, e.offsetY]) ? "pointer" : "default"));
      zr.on("click", (e) => {
        if (!drawn.containPixel("grid", [e.offsetX, e.offsetY])) return;
        const at = drawn.convertFromPixel("grid", [e.offsetX, e.offsetY])[0];
        const steps = drawn.getOption().series.flatMap((s) => (s.data || []).map((d) => d[0]));
        if (!steps.length) return;
        const step = steps.reduce((best, s) => (Math.abs(s - at) < Math.abs(best - at) ? s : best));
        window.location.href = `${target}${step}`;
      });
    };
    attach(100);
  }

  // One crosshair over all charts of a page.
  function follow(drawn, others) {
    drawn.getZr().on("mousemove", (e) => {
      if (!drawn.containPixel("grid", [e.offsetX, e.offsetY])) return;
      const step = drawn.convertFromPixel("grid", [e.offsetX, e.offsetY])[0];
      for (const other of others) {
        if (other === drawn || other.isDisposed()) continue;
        const x = other.convertToPixel({ xAxisIndex: 0 }, step);
        if (Number.isFinite(x)) other.dispatchAction({ type: "updateAxisPointer", currTrigger: "mousemove", x, y: 40 });
      }
    });
    drawn.getZr().on("globalout", () => {
      for (const other of others) if (!other.isDisposed()) other.dispatchAction({ type: "updateAxisPointer", currTrigger: "leave" });
    });
  }

  function isDark() {
    return document.body.classList.contains("body--dark");
  }

  // Once the page stands; until then NiceGUI would set it back.
  function applyTheme(dark) {
    if (typeof setDark === "function" && document.querySelector(".topbar")) setDark(dark);
    else setTimeout(() => applyTheme(dark), 20);
  }
  const chosen = /(?:^|; )mint_theme=(dark|light)/.exec(document.cookie);
  if (chosen) applyTheme(chosen[1] === "dark");

  function toggleTheme() {
    const dark = !isDark();
    applyTheme(dark);
    document.cookie = `mint_theme=${dark ? "dark" : "light"}; path=/; max-age=31536000; samesite=lax`;
  }

  // Keys of pages that have no others: ? for help, g then a letter to go somewhere.
  let pending = false;
  document.addEventListener("keydown", (e) => {
    if (e.ctrlKey || e.metaKey || e.altKey || /^(INPUT|TEXTAREA|SELECT)$/.test(e.target.tagName) || e.target.isContentEditable) return;
    const places = { r: "", p: "playground", s: "server" };
    if (pending && e.key in places) window.location.href = `${window.path_prefix || ""}/${places[e.key]}`;
    pending = e.key === "g";
    if (e.key === "t") toggleTheme();
    if (e.key === "?" && !document.querySelector(".rollouts")) help();
    if (e.key === "Escape") document.querySelector(".help.shared")?.remove();
    if (e.key === "/" && !document.querySelector(".rollouts")) {
      const field = document.querySelector("input[type=search], .search input, input.field");
      if (field) { e.preventDefault(); field.focus(); }
    }
  });

  function help() {
    if (document.querySelector(".help.shared")) return document.querySelector(".help.shared").remove();
    const box = document.createElement("div");
    box.className = "help shared";
    box.onclick = () => box.remove();
    box.innerHTML = `<div><h2>Keys</h2><dl>
      <dt><kbd>g</kbd> <kbd>r</kbd></dt><dd>Runs</dd><dt><kbd>g</kbd> <kbd>p</kbd></dt><dd>Playground</dd>
      <dt><kbd>g</kbd> <kbd>s</kbd></dt><dd>Server</dd><dt><kbd>/</kbd></dt><dd>Search</dd>
      <dt><kbd>t</kbd></dt><dd>Light or dark</dd><dt><kbd>?</kbd></dt><dd>This list; among rollouts there are more</dd></dl></div>`;
    document.body.append(box);
  }

  const percent = (value) => `${Math.round(100 * value)} %`;

  return { number, short, percent, tooltip, chart, toggleTheme, help, escape, connected: [] };
})();
