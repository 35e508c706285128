// Calls of the JSON API.

export class ApiError extends Error {
  constructor(status, code, sentence) {
    super(sentence);
    this.status = status;
    this.code = code;
  }
}

let token = null;

/** Who uses the page: {user, token}. The token is what another site's page cannot have. */
export async function session() {
  const found = await call("session");
  token = found.token;
  return found;
}

export async function get(path, params = {}) {
  const known = Object.entries(params).filter(([, each]) => each !== undefined && each !== null && each !== "");
  const query = new URLSearchParams(known).toString();
  return call(query ? `${path}?${query}` : path);
}

export async function post(path, values) {
  try {
    return await send(path, values);
  } catch (error) {
    if (error.code !== "stale_page") throw error;
    await session(); // The server was started again since the page was loaded.
    return send(path, values);
  }
}

async function send(path, values) {
  if (token === null) await session();
  return call(path, {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Tfmq-Token": token },
    body: JSON.stringify(values),
  });
}

async function call(path, options = {}) {
  let response;
  try {
    response = await fetch(`api/${path}`, { cache: "no-store", credentials: "same-origin", ...options });
  } catch {
    throw new ApiError(0, "connection_failed", "The server does not answer.");
  }
  let found;
  try {
    found = await response.json();
  } catch {
    throw new ApiError(response.status, "error", `The server answered with status ${response.status}.`);
  }
  if (!response.ok) throw new ApiError(response.status, found.error ?? "error", found.message ?? response.statusText);
  return found;
}
