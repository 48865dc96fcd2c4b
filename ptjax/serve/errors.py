"""The one error that reaches a client, in the shape OpenAI's API gives it."""


class ApiError(Exception):
  """What went wrong with one request.

  Args:
    status: of HTTP.
    message: for a person.
    param: the field at fault.
    code: for a program.
    headers: further ones of the response.
  """

  def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None,
               headers: dict[str, str] | None = None):
    super().__init__(message)
    self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

  def again(self) -> 'ApiError':
    """The same error to raise: an instance that is raised many times gathers the traces of all of them."""
    return ApiError(self.status, self.message, param=self.param, code=self.code, headers=self.headers)

  @property
  def body(self) -> dict:
    kinds = {401: 'authentication_error', 429: 'rate_limit_error'}
    kind = kinds.get(self.status, 'server_error' if self.status >= 500 else 'invalid_request_error')
    return {'error': dict(message=self.message, type=kind, param=self.param, code=self.code)}


def invalid(param: str, message: str, code: str = 'invalid_value') -> ApiError:
  """The error for a field's value: status 400, message led by the field's name."""
  return ApiError(400, f'{param}: {message}', param=param, code=code)
