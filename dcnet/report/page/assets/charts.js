// Legends with buttons that hide a series, and sliders that show the values of lines at a position.
(() => {
  const toggle = (button) => {
    const shown = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(shown));
    const chart = document.getElementById(button.getAttribute("aria-controls"));
    for (const group of chart.querySelectorAll(`.series[data-series="${button.dataset.series}"]`)) {
      if (shown) group.removeAttribute("visibility"); else group.setAttribute("visibility", "hidden");
    }
    button.closest("figure").dispatchEvent(new Event("series"));
  };
  for (const button of document.querySelectorAll(".legend button")) {
    button.addEventListener("click", () => toggle(button));
  }

  const reader = (slider) => {
    const figure = slider.closest("figure");
    const box = slider.parentElement;
    const { x, lines } = JSON.parse(figure.querySelector("script.values").textContent);
    const places = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
    const inner = (value) => (x.log ? Math.log10(value) : value);
    const pixel = (value) => {
      const [left, right] = [Number(box.dataset.left), Number(box.dataset.right)];
      return left + ((inner(value) - inner(x.low)) / (inner(x.high) - inner(x.low))) * (right - left);
    };
    const hidden = (i) => figure.querySelector(`.legend [data-series="${i}"]`).getAttribute("aria-pressed") !== "true";
    const reading = (line, at) => {
      const y = line.y[line.x.indexOf(at)];
      return y === undefined ? null : `${line.name}: ${y}`;
    };
    // Epsilons may be tiny; steps are whole numbers, which need all digits.
    const spelled = (value) => value.toLocaleString("en", value < 1 ? { maximumSignificantDigits: 4 } : {});
    const show = (moved) => {
      const at = places[Number(slider.value)];
      const words = lines.filter((_, i) => !hidden(i)).map((line) => reading(line, at)).filter(Boolean);
      const text = `${x.name} ${spelled(at)} – ${words.join("; ") || "no series shown"}`;
      box.querySelector("output").textContent = text;
      slider.setAttribute("aria-valuetext", text);
      const cursor = figure.querySelector(".cursor");
      cursor.setAttribute("x1", pixel(at));
      cursor.setAttribute("x2", pixel(at));
      if (moved) cursor.setAttribute("visibility", "visible");
    };
    slider.addEventListener("input", () => show(true));
    figure.addEventListener("series", () => show(false));
    show(false);
  };
  for (const slider of document.querySelectorAll("[data-reader]")) reader(slider);
})();
