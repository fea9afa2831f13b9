// Calls to the service. The token lives in this tab's session storage and nowhere else.

const TOKEN_KEY = "specdec-admin-token";

/** What the service has against a call. `field` names what it is about, where it is one thing. */
export class ApiError extends Error {
  constructor(status, message, field) {
    super(message);
    this.name = "ApiError";
    this.status = status;
    this.field = field;
  }

  get needsToken() {
    return this.status === 401;
  }
}

export function token() {
  return sessionStorage.getItem(TOKEN_KEY) ?? "";
}

export function setToken(value) {
  if (value === "") sessionStorage.removeItem(TOKEN_KEY);
  else sessionStorage.setItem(TOKEN_KEY, value);
}

/**
 * Calls the service, by a path relative to the page. Throws ApiError for any status but 2xx.
 * @param {string} path
 * @param {{method?: string, body?: unknown, signal?: AbortSignal}} options
 */
export async function call(path, { method = "GET", body, signal } = {}) {
  const headers = {};
  if (token() !== "") headers.authorization = `Bearer ${token()}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const response = await fetch(path, {
    method,
    headers,
    signal,
    body: body === undefined ? undefined : JSON.stringify(body),
    cache: "no-store",
    credentials: "omit",
    redirect: "error",
  });
  if (!response.ok) throw await errorOf(response);
  return response;
}

/** The same, where the answer is JSON. */
export async function callJson(path, options) {
  return (await call(path, options)).json();
}

async function errorOf(response) {
  const told = await response.json().catch(() => ({}));
  const error = told.error ?? {};
  const message = error.message ?? told.detail ?? `the service answered ${response.status}`;
  return new ApiError(response.status, message, error.field ?? null);
}
