// Light or dark theme: the preference of the system, until the button is pressed.
(() => {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const asked = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : asked.matches);
  const show = () => button.setAttribute("aria-pressed", String(dark()));
  // A page from a file may have no storage; then the choice lasts until the page is closed.
  const kept = (use) => { try { return use(localStorage); } catch { return null; } };
  const before = kept((storage) => storage.getItem("dcnet-theme"));
  if (before === "dark" || before === "light") root.dataset.theme = before;
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    kept((storage) => storage.setItem("dcnet-theme", root.dataset.theme));
    show();
  });
  asked.addEventListener("change", show);
  button.hidden = false;
  show();
})();
