// Light, dark or as the system is. Not a module, so that it runs before anything is drawn.
"use strict";

(() => {
  const STORE = "oscar-theme";
  const NAMES = { system: "as the system", light: "light", dark: "dark" };
  const root = document.documentElement;

  function stored() {
    try {
      const theme = localStorage.getItem(STORE);
      return theme in NAMES ? theme : "system";
    } catch {
      return "system";
    }
  }

  function keep(theme) {
    try {
      if (theme === "system") localStorage.removeItem(STORE);
      else localStorage.setItem(STORE, theme);
    } catch {
      // A browser that keeps nothing has the theme until the page is closed.
    }
  }

  function apply(theme) {
    root.dataset.theme = theme;
  }

  function label(button) {
    const text = `Colours: ${NAMES[root.dataset.theme]}`;
    button.title = text;
    document.getElementById("theme-name").textContent = text;
  }

  apply(stored());
  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const names = Object.keys(NAMES);
    label(button);
    button.addEventListener("click", () => {
      apply(names[(names.indexOf(root.dataset.theme) + 1) % names.length]);
      keep(root.dataset.theme);
      label(button);
    });
  });
})();
