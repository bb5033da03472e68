// Every public method of the JavaScript SDK against a running server, as tests of Node.js.
import assert from 'node:assert/strict'
import { after, before, test } from 'node:test'
import { createRequire } from 'node:module'

const require = createRequire(process.env.E2B_TEST_MODULES + '/')
const {
  AuthenticationError,
  CommandExitError,
  FileNotFoundError,
  FileType,
  InvalidArgumentError,
  NotFoundError,
  Sandbox,
  SandboxError,
  Template,
  BuildError,
  TimeoutError,
} = require('e2b')
const { Sandbox: CodeInterpreter } = require('@e2b/code-interpreter')

let box
before(async () => {
  box = await Sandbox.create({ envs: { GIVEN: 'variable' }, metadata: { suite: 'javascript' }, timeoutMs: 3_600_000 })
})
after(async () => box.kill())

test('a command has output, directory, variables and an exit code', async () => {
  let printed = ''
  const done = await box.commands.run('echo $GIVEN $MORE; pwd; echo wrong >&2', {
    envs: { MORE: 'here' },
    cwd: '/tmp',
    onStdout: (data) => void (printed += data),
  })
  assert.equal(done.stdout, 'variable here\n/tmp\n')
  assert.equal(printed, done.stdout)
  assert.equal(done.stderr, 'wrong\n')
  await assert.rejects(box.commands.run('exit 7'), (error) => error instanceof CommandExitError && error.exitCode === 7)
})

test('errors of a command have the classes of the SDK', async () => {
  await assert.rejects(box.commands.run('true', { user: 'nonexistent-user' }), AuthenticationError)
  await assert.rejects(box.commands.run('true', { cwd: '/no/such/place' }), InvalidArgumentError)
  await assert.rejects(box.commands.run('sleep 600', { timeoutMs: 500 }), TimeoutError)
})

test('a background command is listed, gets input, is left and found again', async () => {
  const handle = await box.commands.run('echo before; cat; echo after', { background: true, stdin: true })
  const listed = await box.commands.list()
  assert.ok(listed.some((each) => each.pid === handle.pid && each.args.at(-1) === 'echo before; cat; echo after'))
  await box.commands.sendStdin(handle.pid, 'one\n')
  await handle.disconnect()
  const again = await box.commands.connect(handle.pid)
  await box.commands.sendStdin(handle.pid, 'two\n')
  await box.commands.closeStdin(handle.pid)
  assert.equal((await again.wait()).stdout, 'before\none\ntwo\nafter\n')
  const sleeping = await box.commands.run('sleep 600', { background: true })
  assert.equal(await sleeping.kill(), true)
  assert.equal(await box.commands.kill(sleeping.pid), false)
  await assert.rejects(sleeping.wait(), CommandExitError)
})

test('a terminal has a size and input', async () => {
  let printed = ''
  const decoder = new TextDecoder()
  const handle = await box.pty.create({
    rows: 30,
    cols: 100,
    cwd: '/tmp',
    onData: (data) => void (printed += decoder.decode(data, { stream: true })),
  })
  await box.pty.resize(handle.pid, { rows: 40, cols: 120 })
  await box.pty.sendInput(handle.pid, new TextEncoder().encode('stty size; exit 4\n'))
  await assert.rejects(handle.wait(), (error) => error instanceof CommandExitError && error.exitCode === 4)
  assert.match(printed, /40 120/)
  const second = await box.pty.create({ rows: 24, cols: 80, onData: () => {} })
  assert.equal(await box.pty.kill(second.pid), true)
})

test('files are written, read, listed, moved and removed', async () => {
  const written = await box.files.write('below/text.txt', 'text é')
  assert.equal(await box.files.read(written.path), 'text é')
  const data = new Uint8Array(300_000).map((_, index) => index % 256)
  await box.files.write('/tmp/js/bytes', data.buffer)
  assert.deepEqual(await box.files.read('/tmp/js/bytes', { format: 'bytes' }), data)
  assert.equal((await box.files.read('/tmp/js/bytes', { format: 'blob' })).size, 300_000)
  const stream = await box.files.read('/tmp/js/bytes', { format: 'stream' })
  let size = 0
  for await (const piece of stream) size += piece.length
  assert.equal(size, 300_000)
  await box.files.write('/tmp/js/gzip', 'compressed '.repeat(1000), { gzip: true })
  assert.equal((await box.files.read('/tmp/js/gzip', { gzip: true })).length, 11_000)
  await box.files.write([
    { path: '/tmp/js/1', data: 'one' },
    { path: '/tmp/js/2', data: new Blob(['two']) },
  ])
  assert.equal(await box.files.makeDir('/tmp/js/directory'), true)
  assert.equal(await box.files.makeDir('/tmp/js/directory'), false)
  const listed = await box.files.list('/tmp/js')
  assert.deepEqual(listed.map((each) => each.name), ['1', '2', 'bytes', 'directory', 'gzip'])
  assert.equal(listed[3].type, FileType.DIR)
  assert.equal((await box.files.getInfo('/tmp/js/1')).size, 3)
  assert.equal((await box.files.rename('/tmp/js/1', '/tmp/js/3')).path, '/tmp/js/3')
  await box.files.remove('/tmp/js')
  assert.equal(await box.files.exists('/tmp/js'), false)
  await assert.rejects(box.files.read('/tmp/missing'), FileNotFoundError)
  const signed = await box.downloadUrl(written.path, { useSignatureExpiration: 600_000 })
  assert.equal(await (await fetch(signed)).text(), 'text é')
  const form = new FormData()
  form.append('file', new Blob(['by url']), 'signed')
  assert.equal((await fetch(await box.uploadUrl('/tmp/signed'), { method: 'POST', body: form })).status, 200)
  assert.equal(await box.files.read('/tmp/signed'), 'by url')
})

test('a sandbox is described, found, paused, forked, snapshotted and ended', async () => {
  const own = await Sandbox.create({ metadata: { suite: 'own' } })
  assert.equal(await own.isRunning(), true)
  const info = await own.getInfo()
  assert.deepEqual([info.sandboxId, info.templateId, info.state], [own.sandboxId, 'base', 'running'])
  await own.setTimeout(1_200_000)
  assert.ok((await Sandbox.getInfo(own.sandboxId)).endAt > info.endAt)
  const pages = Sandbox.list({ query: { metadata: { suite: 'own' }, state: ['running'] }, limit: 1 })
  assert.deepEqual((await pages.nextItems()).map((each) => each.sandboxId), [own.sandboxId])
  assert.ok((await own.getMetrics())[0].memTotal > 0)
  await own.files.write('/tmp/state', 'common')
  const [fork] = await own.fork({ count: 1 })
  assert.equal(await fork.files.read('/tmp/state'), 'common')
  await fork.kill()
  const snapshot = await own.createSnapshot({ name: 'javascript' })
  const from = await Sandbox.create(snapshot.snapshotId)
  assert.equal(await from.files.read('/tmp/state'), 'common')
  await from.kill()
  assert.equal(await Sandbox.deleteSnapshot(snapshot.snapshotId), true)
  assert.equal(await own.pause(), true)
  assert.equal(await own.isRunning(), false)
  const same = await Sandbox.connect(own.sandboxId)
  assert.equal(await same.files.read('/tmp/state'), 'common')
  assert.equal(await same.kill(), true)
  assert.equal(await same.kill(), false)
  await assert.rejects(Sandbox.connect(own.sandboxId), NotFoundError)
  await assert.rejects(Sandbox.create('unknown'), (error) => error instanceof SandboxError && /not found/.test(error.message))
  await assert.rejects(Sandbox.create({ apiKey: 'e2b_wrong' }), AuthenticationError)
})

test('a template is built where the engine can build it', async () => {
  const built = Template().fromBaseImage().setEnvs({ BUILT: 'yes' }).runCmd('echo made > /root/made')
  await Template.build(built, 'javascript-template')
  const own = await Sandbox.create('javascript-template')
  assert.equal((await own.commands.run('cat /root/made; echo $BUILT')).stdout, 'made\nyes\n')
  await own.kill()
  const failing = Template().fromBaseImage().runCmd('echo reason; exit 3')
  await assert.rejects(Template.build(failing, 'failing'), (error) => error instanceof BuildError && /reason/.test(error.message))
})

if (process.env.E2B_TEST_INTERPRETER) {
  test('the code interpreter keeps its state, and has results and errors', async () => {
    const own = await CodeInterpreter.create()
    await own.runCode('x = 41')
    const done = await own.runCode('print("printed"); x + 1')
    assert.equal(done.text, '42')
    assert.deepEqual(done.logs.stdout, ['printed\n'])
    assert.equal((await own.runCode('1 / 0')).error.name, 'ZeroDivisionError')
    await own.kill()
  })
}
