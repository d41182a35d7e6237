"use strict";
(function () {
  const by = (id) => document.getElementById(id);
  const rows = Array.from(document.querySelectorAll("tbody tr"));
  const dots = Array.from(document.querySelectorAll(".dot[data-id]"));
  const figures = Array.from(document.querySelectorAll("figure[data-threads]"));
  const heads = Array.from(document.querySelectorAll("th[data-sort]"));
  const controls = ["filter", "work", "threads", "verdict"].map(by).filter(Boolean);
  const value = (id) => (by(id) ? by(id).value : "");

  // As `monotile bench --filter`: each word begins some word of the name.
  function matches(name, wanted) {
    const words = name.toLowerCase().split(/\s+/);
    return wanted.toLowerCase().split(/\s+/).every((w) => words.some((word) => word.startsWith(w)));
  }

  function visible(row) {
    const data = row.dataset, verdict = value("verdict");
    return matches(data.name, value("filter").trim())
      && (!value("work") || data.work === value("work"))
      && (!value("threads") || data.threads === value("threads"))
      && (!verdict || (verdict === "doubtful" ? data.doubtful === "yes" : data.verdict === verdict));
  }

  function apply() {
    const shown = new Set();
    for (const row of rows) {
      row.hidden = !visible(row);
      if (!row.hidden) shown.add(row.dataset.id);
    }
    // SVG elements have no `hidden` property.
    for (const dot of dots) dot.toggleAttribute("hidden", !shown.has(dot.dataset.id));
    for (const figure of figures) {
      figure.hidden = Boolean(value("threads")) && figure.dataset.threads !== value("threads");
    }
    by("shown").textContent = shown.size + " of " + rows.length + " rows";
  }

  // Rows without the number come last, in either order.
  function sort(key, descending) {
    const number = key !== "name";
    const keyed = rows.map((row) => {
      const text = row.dataset[key === "order" ? "id" : key];
      return { row, key: number ? (text === "" ? null : Number(text)) : text };
    });
    keyed.sort((a, b) => {
      if (a.key === null || b.key === null) return (a.key === null) - (b.key === null);
      const order = number ? a.key - b.key : a.key.localeCompare(b.key, "en", { numeric: true });
      return descending ? -order : order;
    });
    document.querySelector("tbody").append(...keyed.map((one) => one.row));
    for (const head of heads) {
      head.removeAttribute("aria-sort");
      if (head.dataset.sort === key) head.setAttribute("aria-sort", descending ? "descending" : "ascending");
    }
  }

  for (const control of controls) control.addEventListener("input", apply);
  by("sort").addEventListener("input", () => sort(value("sort"), false));
  for (const head of heads) {
    head.addEventListener("click", () => sort(head.dataset.sort, head.getAttribute("aria-sort") === "ascending"));
  }
  by("theme").addEventListener("click", () => {
    const root = document.documentElement, system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
    root.dataset.theme = (root.dataset.theme || system) === "dark" ? "light" : "dark";
  });
  apply();
})();
