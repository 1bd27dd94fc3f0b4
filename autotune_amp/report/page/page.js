"use strict";
const root = document.documentElement;
const toggle = document.getElementById("theme");
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const probe = document.body.appendChild(document.createElement("span"));
probe.hidden = true;

const isDark = () => (root.style.colorScheme || (prefersDark.matches ? "dark" : "light")) === "dark";

// Replaces each "var(--name)" in a figure by its colour in the current theme.
function inTheme(value) {
  if (typeof value === "string" && value.startsWith("var(--")) {
    probe.style.color = value;
    return getComputedStyle(probe).color;
  }
  if (Array.isArray(value)) return value.map(inTheme);
  if (value && typeof value === "object") {
    return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, inTheme(inner)]));
  }
  return value;
}

async function loadPlotly() {
  const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (c) => c.charCodeAt(0));
  const script = document.createElement("script");
  script.textContent = await new Response(
    new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip")),
  ).text();
  document.head.append(script);
}

// Hides each label that would cover another; its mark still shows it on hover.
function hideCovering(plot) {
  const shown = [];
  for (const label of plot.querySelectorAll(".textpoint text")) {
    const box = label.getBoundingClientRect();
    const covers = shown.some(
      (other) =>
        box.left < other.right && other.left < box.right && box.top < other.bottom && other.top < box.bottom,
    );
    label.style.visibility = covers ? "hidden" : "";
    if (!covers) shown.push(box);
  }
}

// Charts in a closed section have no width: they are drawn when it unfolds.
async function draw() {
  toggle.textContent = isDark() ? "Light" : "Dark";
  if (!window.Plotly) return;
  for (const chart of document.querySelectorAll("figure.chart")) {
    if (chart.closest("details:not([open])")) continue;
    const figure = inTheme(JSON.parse(chart.querySelector("script").textContent));
    const plot = chart.querySelector(".plot");
    const isFirst = plot.querySelector(".absent");
    isFirst?.remove();
    await Plotly.react(plot, figure.data, figure.layout, {
      responsive: true,
      displaylogo: false,
      modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
    });
    if (isFirst) plot.on("plotly_afterplot", () => hideCovering(plot)); // at a new width, zoom or theme
    hideCovering(plot);
  }
  root.dataset.drawn = isDark() ? "dark" : "light";
}

async function copy(button) {
  const text = button.closest(".code").querySelector("pre");
  try {
    await navigator.clipboard.writeText(text.textContent);
  } catch {
    // Some browsers offer no clipboard to a page opened from a file: select the text, so that the reader can copy it.
    getSelection().selectAllChildren(text);
    document.execCommand("copy");
  }
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

toggle.addEventListener("click", () => {
  root.style.colorScheme = isDark() ? "light" : "dark";
  draw();
});
prefersDark.addEventListener("change", draw);
for (const section of document.querySelectorAll("details")) section.addEventListener("toggle", draw);
addEventListener("beforeprint", () => {
  for (const section of document.querySelectorAll("details")) section.open = true;
});
for (const button of document.querySelectorAll("button.copy")) button.addEventListener("click", () => copy(button));
loadPlotly().then(draw);
draw();
