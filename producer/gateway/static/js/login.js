// The login page: a key for a session.
import { post } from "./api.js";

const form = document.getElementById("login");
const field = document.getElementById("key");
const alertPlace = document.getElementById("login-error");
const button = document.getElementById("submit");

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  if (field.value.trim() === "") {
    refuse("Enter an API key.");
    return;
  }
  button.disabled = true;
  alertPlace.textContent = "";
  try {
    await post("/login", { key: field.value.trim() });
    field.value = "";
    location.replace(target());
  } catch (error) {
    refuse(error.message);
  } finally {
    button.disabled = false;
  }
});

function refuse(text) {
  alertPlace.textContent = text;
  field.setAttribute("aria-invalid", "true");
  field.focus();
  field.select();
}

/** Where the reader wanted to go, if that is a page of ours. */
function target() {
  const wanted = new URLSearchParams(location.search).get("next") ?? "";
  return /^\/dashboard(\/[^/\\]|\/?$)/.test(wanted) ? wanted : "/dashboard/";
}
