// Calls to the service. The admin token is stored only in the session storage of this tab.

const TOKEN_KEY = "specdec-admin-token";

/** An error response of the service. `field` names the invalid field, or is null. */
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
  if (!response.ok) throw await toError(response);
  return response;
}

/** Like call(), and parses the JSON body. */
export async function callJson(path, options) {
  return (await call(path, options)).json();
}

async function toError(response) {
  const body = await response.json().catch(() => ({}));
  const error = body.error ?? {};
  const message = error.message ?? body.detail ?? `the service returned status ${response.status}`;
  return new ApiError(response.status, message, error.field ?? null);
}
