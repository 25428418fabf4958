// Before the first paint: a chosen theme, so that no page flashes in the other one.
(() => {
  try {
    const theme = localStorage.getItem("tokenmill-theme");
    if (theme === "light" || theme === "dark") {
      document.documentElement.dataset.theme = theme;
    }
  } catch {
    // Storage is blocked: the system's theme it is.
  }
})();
