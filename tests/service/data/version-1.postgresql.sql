
CREATE TABLE public.agents (
    agent_id text NOT NULL,
    role text NOT NULL,
    token_hash text NOT NULL,
    created_at double precision NOT NULL,
    limits text NOT NULL,
    disabled boolean NOT NULL,
    token_at double precision NOT NULL
);

CREATE TABLE public.approvals (
    approval_id text NOT NULL,
    session_id text NOT NULL,
    agent_id text NOT NULL,
    command text NOT NULL,
    reason text NOT NULL,
    asked_at double precision NOT NULL,
    expires_at double precision NOT NULL,
    command_id text NOT NULL,
    data bytea NOT NULL,
    outcome text NOT NULL,
    answered_by text NOT NULL,
    comment text NOT NULL
);

CREATE TABLE public.audit_rows (
    session_id text NOT NULL,
    seq bigint NOT NULL,
    at double precision NOT NULL,
    agent_id text NOT NULL,
    kind text NOT NULL,
    command_id text NOT NULL,
    body text NOT NULL,
    previous text NOT NULL,
    hash text NOT NULL
);

CREATE TABLE public.audit_streams (
    session_id text NOT NULL,
    last_seq bigint NOT NULL,
    last_hash text NOT NULL,
    size bigint NOT NULL,
    base_seq bigint NOT NULL,
    base_hash text NOT NULL,
    opened_seq bigint NOT NULL,
    marked_seq bigint NOT NULL,
    removed_seq bigint NOT NULL,
    closed boolean NOT NULL
);

CREATE TABLE public.facts (
    name text NOT NULL,
    value text NOT NULL
);

CREATE TABLE public.holdfast_versions (
    version bigint NOT NULL,
    applied_at double precision NOT NULL
);

CREATE TABLE public.session_labels (
    session_id text NOT NULL,
    name text NOT NULL,
    value text NOT NULL
);

CREATE TABLE public.sessions (
    session_id text NOT NULL,
    agent_id text NOT NULL,
    kind text NOT NULL,
    sandbox text NOT NULL,
    policy text NOT NULL,
    created_at double precision NOT NULL,
    last_activity_at double precision NOT NULL,
    initial_cwd text NOT NULL,
    state text NOT NULL,
    shell text NOT NULL,
    environment text NOT NULL,
    labels text NOT NULL,
    cols bigint NOT NULL,
    rows bigint NOT NULL,
    enforced text NOT NULL,
    unenforced text NOT NULL,
    closed_at double precision,
    close_reason text NOT NULL,
    summary text NOT NULL,
    request_id text NOT NULL,
    audited_token bigint NOT NULL,
    commands_run bigint NOT NULL,
    warned_at double precision,
    lease_owner text DEFAULT ''::text NOT NULL,
    lease_expires double precision DEFAULT 0 NOT NULL,
    lease_epoch bigint DEFAULT 0 NOT NULL
);

INSERT INTO public.agents VALUES ('operator', 'operator', '4f23c4ab11e9a97cf203eb6690f17eb897d3d1650f4599ae163d16b23a1265af', 1794983772.9702125, '{}', false, 1794983772.9702125);
INSERT INTO public.agents VALUES ('builder', 'agent', '6665209ba695a78876fc57402f27e41606eade75c8e3e49c8366747a292e7c47', 1794983777.0831885, '{"profile":"default"}', false, 1794983777.0831885);

INSERT INTO public.approvals VALUES ('apr-d5c6a4334d517581', 'ses-2d032d4989b5070341ca', 'operator', 'touch x', '`touch` matches the rule `touch`', 1794983775.8095136, 1794984075.8095136, 'cmd-095b84d399766c0c', '\x', 'approved', 'operator', 'because');
INSERT INTO public.approvals VALUES ('apr-1dc603740e62a42d', 'ses-2d032d4989b5070341ca', 'operator', 'touch x', '`touch` matches the rule `touch`', 1794983775.8842294, 1794984075.8842294, 'cmd-db6e4d99b71ebd9c', '\x', 'refused', 'operator', 'because');
INSERT INTO public.approvals VALUES ('apr-22914f269eaf3470', 'ses-1c10f06ec95419b7e7fa', 'operator', 'touch later; echo T=$?', '`touch` matches the rule `touch`', 1794983776.1461418, 1794984076.1461418, 'cmd-bd685478771cd4bf', '\x746f756368206c617465723b206563686f20543d243f', '', '', '');

INSERT INTO public.audit_rows VALUES ('', 1, 1794983772.9775596, 'operator', 'agent_added', '', '{"role":"operator"}', '0000000000000000000000000000000000000000000000000000000000000000', '550f08c90190b560dbf6aa7cccd34e27ce75be576a13d4a94dd0fe34aea52771');
INSERT INTO public.audit_rows VALUES ('ses-dd4dcb497f20e461cbf8', 1, 1794983774.4084132, 'operator', 'session_created', '', '{"by":"operator","cwd":"/tmp/hf-postgresql/state/holdfast/workspaces/operator","enforced":["filesystem","network","signals","syscalls","processes","memory","wall_clock"],"environment":{},"kind":"terminal","profile":"default","sandbox":"local","sandbox_mode":"bubblewrap","shell":"","unenforced":["output"]}', '0000000000000000000000000000000000000000000000000000000000000000', '3f66e2f69a898714685c00862e246e2915e8cb3712531543544f2c7d020e6a1f');
INSERT INTO public.audit_rows VALUES ('', 2, 1794983774.4085007, '', 'stream_opened', '', '{"session_id":"ses-dd4dcb497f20e461cbf8"}', '550f08c90190b560dbf6aa7cccd34e27ce75be576a13d4a94dd0fe34aea52771', 'c1fee36d72cc0e249a60a2435a1def8b45ac8b30a62879643a0f3f3532b1dcfc');
INSERT INTO public.audit_rows VALUES ('ses-dd4dcb497f20e461cbf8', 2, 1794983775.2532175, 'operator', 'event', '', '{"detail":"terminal in local","state":"RUNNING","type":"SESSION_CREATED"}', '3f66e2f69a898714685c00862e246e2915e8cb3712531543544f2c7d020e6a1f', '54ce766d3de5fa0c9a4406469d59809f13760b10d13054915f56535efa602d10');
INSERT INTO public.audit_rows VALUES ('ses-ab671a21430ce67e1713', 1, 1794983775.278592, 'operator', 'session_created', '', '{"by":"operator","cwd":"/tmp/hf-postgresql/state/holdfast/workspaces/operator","enforced":["filesystem","network","signals","syscalls","processes","memory","wall_clock"],"environment":{},"kind":"shell","profile":"default","sandbox":"local","sandbox_mode":"bubblewrap","shell":"","unenforced":["output"]}', '0000000000000000000000000000000000000000000000000000000000000000', 'b1f98e313443bbc9d3a69edad5a8dc5d10e4f1de976d4044c652731f61bbe5ec');
INSERT INTO public.audit_rows VALUES ('', 3, 1794983775.2786632, '', 'stream_opened', '', '{"session_id":"ses-ab671a21430ce67e1713"}', 'c1fee36d72cc0e249a60a2435a1def8b45ac8b30a62879643a0f3f3532b1dcfc', 'ef915a83563e7f7011654c4f51fae882360a2353217948796640623542ba248c');
INSERT INTO public.audit_rows VALUES ('ses-ab671a21430ce67e1713', 2, 1794983775.3901832, 'operator', 'event', '', '{"detail":"shell in local","state":"RUNNING","type":"SESSION_CREATED"}', 'b1f98e313443bbc9d3a69edad5a8dc5d10e4f1de976d4044c652731f61bbe5ec', 'd62c5d537a543ab240b5e119405370ff877deab504530b6d21243792f769b0c8');
INSERT INTO public.audit_rows VALUES ('ses-2d032d4989b5070341ca', 1, 1794983775.4202669, 'operator', 'session_created', '', '{"by":"operator","cwd":"/tmp/hf-postgresql/state/holdfast/workspaces/operator","enforced":["filesystem","network","signals","syscalls","processes","memory","wall_clock"],"environment":{},"kind":"shell","profile":"default","sandbox":"local","sandbox_mode":"bubblewrap","shell":"","unenforced":["output"]}', '0000000000000000000000000000000000000000000000000000000000000000', '91cc71b3c0b814a54df2618e34e6d34ae68f79e3ad124dc7a6d8aec4fe8e2604');
INSERT INTO public.audit_rows VALUES ('', 4, 1794983775.4203253, '', 'stream_opened', '', '{"session_id":"ses-2d032d4989b5070341ca"}', 'ef915a83563e7f7011654c4f51fae882360a2353217948796640623542ba248c', 'e874f98104dde068b97c1d73dc93ca61ccd3cf9d413b05d501ef8d4dd55670a8');
INSERT INTO public.audit_rows VALUES ('ses-2d032d4989b5070341ca', 2, 1794983775.5362098, 'operator', 'event', '', '{"detail":"shell in local","state":"RUNNING","type":"SESSION_CREATED"}', '91cc71b3c0b814a54df2618e34e6d34ae68f79e3ad124dc7a6d8aec4fe8e2604', '007dede63c16150f7c12027cb82355c8dc07147d2c5a82dd9a1601708d6630e0');
INSERT INTO public.audit_rows VALUES ('ses-f5b3f06684d4edcded40', 1, 1794983775.63648, 'operator', 'session_created', '', '{"by":"operator","cwd":"/tmp/hf-postgresql/state/holdfast/workspaces/operator","enforced":["filesystem","network","signals","syscalls","processes","memory","wall_clock"],"environment":{},"kind":"shell","profile":"default","sandbox":"local","sandbox_mode":"bubblewrap","shell":"","unenforced":["output"]}', '0000000000000000000000000000000000000000000000000000000000000000', 'fa82fc3a848f237c1e206c4aea978dd02606ea8400c4797ceb8bc8ef73550521');
INSERT INTO public.audit_rows VALUES ('', 5, 1794983775.6365364, '', 'stream_opened', '', '{"session_id":"ses-f5b3f06684d4edcded40"}', 'e874f98104dde068b97c1d73dc93ca61ccd3cf9d413b05d501ef8d4dd55670a8', '31162895ef952fcde9eec11430026481e95df89305506405ad4ace77091383f5');
INSERT INTO public.audit_rows VALUES ('ses-f5b3f06684d4edcded40', 2, 1794983775.7492998, 'operator', 'event', '', '{"detail":"shell in local","state":"RUNNING","type":"SESSION_CREATED"}', 'fa82fc3a848f237c1e206c4aea978dd02606ea8400c4797ceb8bc8ef73550521', '1724a2ed817bb18d471dfb2fc40f58ebae74b61fafafca1e6e973bd5159be0ed');
INSERT INTO public.audit_rows VALUES ('ses-ab671a21430ce67e1713', 3, 1794983775.7638185, 'operator', 'command', 'cmd-af23a8e11a43404e', '{"by":"operator","bytes":20,"cut":false,"lines":1,"open":false,"position":0,"rule":"built-in","text":"X=kept; echo hi; pwd"}', 'd62c5d537a543ab240b5e119405370ff877deab504530b6d21243792f769b0c8', '6bfd439156287a7a4a3601a0d451fa304aece7aeb27e2e16ffedc3847a4f240b');
INSERT INTO public.audit_rows VALUES ('ses-ab671a21430ce67e1713', 4, 1794983775.7775452, 'operator', 'command_ended', 'cmd-af23a8e11a43404e', '{"cut":false,"duration":0.013633,"exit_code":0,"number":1,"output":"hi\n/tmp/hf-postgresql/state/holdfast/workspaces/operator\n","output_bytes":57,"session_bytes":57}', '6bfd439156287a7a4a3601a0d451fa304aece7aeb27e2e16ffedc3847a4f240b', 'b0ce038649baee3d7ae52bd826b4bd07a1dbd9845f821c0af1f779646689f2d8');
INSERT INTO public.audit_rows VALUES ('ses-2d032d4989b5070341ca', 3, 1794983775.784769, 'operator', 'command', 'cmd-906b5875085ed85a', '{"by":"operator","bytes":29,"cut":false,"lines":1,"open":false,"position":0,"rule":"built-in","text":"echo secret > f; cat f; false"}', '007dede63c16150f7c12027cb82355c8dc07147d2c5a82dd9a1601708d6630e0', 'f2382b21141295729741e6d6412ad371a6d853f2d6fb766e8352f5e0947f0da1');
INSERT INTO public.audit_rows VALUES ('ses-2d032d4989b5070341ca', 4, 1794983775.799504, 'operator', 'command_ended', 'cmd-906b5875085ed85a', '{"cut":false,"duration":0.014689,"exit_code":1,"number":1,"output":"secret\n","output_bytes":7,"session_bytes":7}', 'f2382b21141295729741e6d6412ad371a6d853f2d6fb766e8352f5e0947f0da1', '8275662ae81a86840b894daa538fafb39b1a47914cd7eae2a75288c9a2222c39');
INSERT INTO public.audit_rows VALUES ('ses-2d032d4989b5070341ca', 5, 1794983775.8095136, 'operator', 'decision', 'cmd-095b84d399766c0c', '{"approval_id":"apr-d5c6a4334d517581","command":"touch x","reason":"`touch` matches the rule `touch`","rule":"/tmp/upg/b/rules.toml:1","verdict":"ask"}', '8275662ae81a86840b894daa538fafb39b1a47914cd7eae2a75288c9a2222c39', 'd2b9d13d3504f025d30b503edf397cd344224d1386d7d45707fd2d74b47e6ca3');
INSERT INTO public.audit_rows VALUES ('ses-2d032d4989b5070341ca', 6, 1794983775.8095136, 'operator', 'event', 'cmd-095b84d399766c0c', '{"approval_id":"apr-d5c6a4334d517581","detail":"touch x: `touch` matches the rule `touch`","state":"RUNNING","type":"APPROVAL_REQUESTED"}', 'd2b9d13d3504f025d30b503edf397cd344224d1386d7d45707fd2d74b47e6ca3', 'f1e7bb8f0bc36bbe40dd0a509b184947521c015790c0a2f8ddd1fc522e8ff057');
INSERT INTO public.audit_rows VALUES ('ses-2d032d4989b5070341ca', 7, 1794983775.844928, 'operator', 'approval_answered', 'cmd-095b84d399766c0c', '{"approval_id":"apr-d5c6a4334d517581","by":"operator","command":"touch x","comment":"because","outcome":"approved"}', 'f1e7bb8f0bc36bbe40dd0a509b184947521c015790c0a2f8ddd1fc522e8ff057', '0bf5d4b838e1a5347f93198c6871c6949a4073d9ce7e2ad66e821bcf880f0e6f');
INSERT INTO public.audit_rows VALUES ('ses-2d032d4989b5070341ca', 8, 1794983775.844928, 'operator', 'event', 'cmd-095b84d399766c0c', '{"approval_id":"apr-d5c6a4334d517581","detail":"approved by operator: touch x","state":"RUNNING","type":"APPROVAL_ANSWERED"}', '0bf5d4b838e1a5347f93198c6871c6949a4073d9ce7e2ad66e821bcf880f0e6f', 'f7c7e87a7f1782b0a4d229e1819ecff65b780585fa2ecb224f89f16d9b33b466');
INSERT INTO public.audit_rows VALUES ('ses-2d032d4989b5070341ca', 9, 1794983775.8608155, 'operator', 'command', 'cmd-095b84d399766c0c', '{"by":"operator","bytes":7,"cut":false,"lines":1,"open":false,"position":1,"rule":"/tmp/upg/b/rules.toml:1","text":"touch x"}', 'f7c7e87a7f1782b0a4d229e1819ecff65b780585fa2ecb224f89f16d9b33b466', 'fd35a58d7c705a049349d68c6cdac48e3dd9e83a7cb8a3aa0b0e791fb4aca8de');
INSERT INTO public.audit_rows VALUES ('ses-2d032d4989b5070341ca', 10, 1794983775.8760808, 'operator', 'command_ended', 'cmd-095b84d399766c0c', '{"cut":false,"duration":0.015186,"exit_code":0,"number":2,"output":"","output_bytes":0,"session_bytes":7}', 'fd35a58d7c705a049349d68c6cdac48e3dd9e83a7cb8a3aa0b0e791fb4aca8de', 'b91c887a21ec6fa039de863bf6ebe10b855e9ec83d8fc51ee733c2ea072a5a20');
INSERT INTO public.audit_rows VALUES ('ses-2d032d4989b5070341ca', 11, 1794983775.8842294, 'operator', 'decision', 'cmd-db6e4d99b71ebd9c', '{"approval_id":"apr-1dc603740e62a42d","command":"touch x","reason":"`touch` matches the rule `touch`","rule":"/tmp/upg/b/rules.toml:1","verdict":"ask"}', 'b91c887a21ec6fa039de863bf6ebe10b855e9ec83d8fc51ee733c2ea072a5a20', 'abb5ebedb2aa94a2344ada1aa6b2fe9b95712e373e701e24bef7f537748abdf9');
INSERT INTO public.audit_rows VALUES ('ses-2d032d4989b5070341ca', 12, 1794983775.8842294, 'operator', 'event', 'cmd-db6e4d99b71ebd9c', '{"approval_id":"apr-1dc603740e62a42d","detail":"touch x: `touch` matches the rule `touch`","state":"RUNNING","type":"APPROVAL_REQUESTED"}', 'abb5ebedb2aa94a2344ada1aa6b2fe9b95712e373e701e24bef7f537748abdf9', '973fc48dbcf6f2aaf7868e67944128b1c69b5ca6a37e620a42bebfaaeec9ca0a');
INSERT INTO public.audit_rows VALUES ('ses-2d032d4989b5070341ca', 13, 1794983775.9174967, 'operator', 'approval_answered', 'cmd-db6e4d99b71ebd9c', '{"approval_id":"apr-1dc603740e62a42d","by":"operator","command":"touch x","comment":"because","outcome":"refused"}', '973fc48dbcf6f2aaf7868e67944128b1c69b5ca6a37e620a42bebfaaeec9ca0a', '4373a802d0cf6041f392c04c92905e2dff9b0def90941095d75273a144338e40');
INSERT INTO public.audit_rows VALUES ('ses-2d032d4989b5070341ca', 14, 1794983775.9174967, 'operator', 'event', 'cmd-db6e4d99b71ebd9c', '{"approval_id":"apr-1dc603740e62a42d","detail":"refused by operator: touch x","state":"RUNNING","type":"APPROVAL_ANSWERED"}', '4373a802d0cf6041f392c04c92905e2dff9b0def90941095d75273a144338e40', 'f632c07a499a538557ae67966f00b27874b47e2e067ba627092bab2f63098b08');
INSERT INTO public.audit_rows VALUES ('ses-2d032d4989b5070341ca', 15, 1794983775.9368927, 'operator', 'close', '', '{"by":"operator","mode":"graceful","reason":"closed by operator"}', 'f632c07a499a538557ae67966f00b27874b47e2e067ba627092bab2f63098b08', '53c65ecfb39028435c5c1a6db56bddf509cc08b91362d562f6e0841dd7dec6d9');
INSERT INTO public.audit_rows VALUES ('ses-2d032d4989b5070341ca', 16, 1794983775.9644797, 'operator', 'session_closed', '', '{"detail":"closed","reason":"closed by operator","state":"CLOSED","summary":"CLOSED (closed by operator): closed; open for 0.6 s; 2 commands; 7 bytes of output; last exit code 0"}', '53c65ecfb39028435c5c1a6db56bddf509cc08b91362d562f6e0841dd7dec6d9', '54c5c279ffd6a4e4efe9775f094800acd7e8b5038bc87f7ec3c860a34d962116');
INSERT INTO public.audit_rows VALUES ('ses-2d032d4989b5070341ca', 17, 1794983775.9644797, 'operator', 'event', '', '{"detail":"CLOSED (closed by operator): closed; open for 0.6 s; 2 commands; 7 bytes of output; last exit code 0","state":"CLOSED","type":"SESSION_CLOSED"}', '54c5c279ffd6a4e4efe9775f094800acd7e8b5038bc87f7ec3c860a34d962116', 'ea92cc07dbc918a8817a2e25190118c7755cdb0ff3e0291a86ac2de969fb3b50');
INSERT INTO public.audit_rows VALUES ('ses-dd4dcb497f20e461cbf8', 3, 1794983776.1785722, 'operator', 'input', 'cmd-6061c3b5e6f1791c', '{"by":"operator","bytes":11,"cut":false,"lines":1,"open":false,"position":64,"rule":"built-in","text":"sleep 1000\n"}', '54ce766d3de5fa0c9a4406469d59809f13760b10d13054915f56535efa602d10', 'c6620e70cf368393df590b3da9a2c604d1aad47f4ae51004aa404257b68c152d');
INSERT INTO public.audit_rows VALUES ('', 6, 1794983775.9731584, '', 'stream_marked', '', '{"hash":"ea92cc07dbc918a8817a2e25190118c7755cdb0ff3e0291a86ac2de969fb3b50","opened":4,"seq":17,"session_id":"ses-2d032d4989b5070341ca"}', '31162895ef952fcde9eec11430026481e95df89305506405ad4ace77091383f5', '0b605b2273d4b6a3b41a6ebb9bf6cecab34ee9ff44328a4b3655b879d156a00d');
INSERT INTO public.audit_rows VALUES ('ses-1c10f06ec95419b7e7fa', 2, 1794983776.1170497, 'operator', 'event', '', '{"detail":"terminal in local","state":"RUNNING","type":"SESSION_CREATED"}', 'b9893c743c13d4eb19d2c764a2960edcc05daf80a5df1823748903ab84fb005c', '76772f64cbe9ee22c400abd2223aa0555f5548f4464f8b3d4ab3e64ab8b34bbb');
INSERT INTO public.audit_rows VALUES ('ses-1c10f06ec95419b7e7fa', 3, 1794983776.1461418, 'operator', 'decision', 'cmd-bd685478771cd4bf', '{"approval_id":"apr-22914f269eaf3470","command":"touch later; echo T=$?","reason":"`touch` matches the rule `touch`","rule":"/tmp/upg/b/rules.toml:1","verdict":"ask"}', '76772f64cbe9ee22c400abd2223aa0555f5548f4464f8b3d4ab3e64ab8b34bbb', '92a2a67d3124bc7c111779eabc8f5dcd37fa7b4d0ac5108b20f5c724ace9293d');
INSERT INTO public.audit_rows VALUES ('ses-1c10f06ec95419b7e7fa', 4, 1794983776.1461418, 'operator', 'event', 'cmd-bd685478771cd4bf', '{"approval_id":"apr-22914f269eaf3470","detail":"touch later; echo T=$?: `touch` matches the rule `touch`","state":"RUNNING","type":"APPROVAL_REQUESTED"}', '92a2a67d3124bc7c111779eabc8f5dcd37fa7b4d0ac5108b20f5c724ace9293d', 'a12cf68ce40e1421e708f4b80f1e557d0f1a4a3d3c1012279e9bebeecd54a556');
INSERT INTO public.audit_rows VALUES ('ses-1c10f06ec95419b7e7fa', 1, 1794983776.0122678, 'operator', 'session_created', '', '{"by":"operator","cwd":"/tmp/hf-postgresql/state/holdfast/workspaces/operator","enforced":["filesystem","network","signals","syscalls","processes","memory","wall_clock"],"environment":{},"kind":"terminal","profile":"default","sandbox":"local","sandbox_mode":"bubblewrap","shell":"","unenforced":["output"]}', '0000000000000000000000000000000000000000000000000000000000000000', 'b9893c743c13d4eb19d2c764a2960edcc05daf80a5df1823748903ab84fb005c');
INSERT INTO public.audit_rows VALUES ('', 7, 1794983776.0123255, '', 'stream_opened', '', '{"session_id":"ses-1c10f06ec95419b7e7fa"}', '0b605b2273d4b6a3b41a6ebb9bf6cecab34ee9ff44328a4b3655b879d156a00d', '3d75f94905b3c141020ebdcc0bdc70076a91bcd7674899fcd901297a1673cb6c');
INSERT INTO public.audit_rows VALUES ('ses-dd4dcb497f20e461cbf8', 4, 1794983776.182895, 'operator', 'command_started', 'cmd-6061c3b5e6f1791c', '{"number":1,"start":"000000000000000000005600000000000000000051b69ec41f"}', 'c6620e70cf368393df590b3da9a2c604d1aad47f4ae51004aa404257b68c152d', '880b0715cb69f4a29e47d9cbcdc406e6cbdd065ab1f4b0cbfc2a1aa50a9de615');
INSERT INTO public.audit_rows VALUES ('', 8, 1794983777.0969934, 'builder', 'agent_added', '', '{"profile":"default","role":"agent"}', '3d75f94905b3c141020ebdcc0bdc70076a91bcd7674899fcd901297a1673cb6c', 'e7db6621d7efb06c38945c19597c04e8144818d243176ddc59a1bf053a2e71b2');

INSERT INTO public.audit_streams VALUES ('ses-2d032d4989b5070341ca', 17, 'ea92cc07dbc918a8817a2e25190118c7755cdb0ff3e0291a86ac2de969fb3b50', 9099, 0, '0000000000000000000000000000000000000000000000000000000000000000', 4, 6, 0, true);
INSERT INTO public.audit_streams VALUES ('ses-f5b3f06684d4edcded40', 2, '1724a2ed817bb18d471dfb2fc40f58ebae74b61fafafca1e6e973bd5159be0ed', 1173, 0, '0000000000000000000000000000000000000000000000000000000000000000', 5, 0, 0, false);
INSERT INTO public.audit_streams VALUES ('ses-ab671a21430ce67e1713', 4, 'b0ce038649baee3d7ae52bd826b4bd07a1dbd9845f821c0af1f779646689f2d8', 2263, 0, '0000000000000000000000000000000000000000000000000000000000000000', 3, 0, 0, false);
INSERT INTO public.audit_streams VALUES ('ses-1c10f06ec95419b7e7fa', 4, 'a12cf68ce40e1421e708f4b80f1e557d0f1a4a3d3c1012279e9bebeecd54a556', 2297, 0, '0000000000000000000000000000000000000000000000000000000000000000', 7, 0, 0, false);
INSERT INTO public.audit_streams VALUES ('ses-dd4dcb497f20e461cbf8', 4, '880b0715cb69f4a29e47d9cbcdc406e6cbdd065ab1f4b0cbfc2a1aa50a9de615', 2169, 0, '0000000000000000000000000000000000000000000000000000000000000000', 2, 0, 0, false);
INSERT INTO public.audit_streams VALUES ('', 8, 'e7db6621d7efb06c38945c19597c04e8144818d243176ddc59a1bf053a2e71b2', 3595, 0, '0000000000000000000000000000000000000000000000000000000000000000', 0, 0, 0, false);

INSERT INTO public.facts VALUES ('audit_key', '');

INSERT INTO public.holdfast_versions VALUES (1, 1794983772.7071576);

INSERT INTO public.session_labels VALUES ('ses-dd4dcb497f20e461cbf8', 't', 'loop');
INSERT INTO public.session_labels VALUES ('ses-ab671a21430ce67e1713', 't', 'shell');
INSERT INTO public.session_labels VALUES ('ses-2d032d4989b5070341ca', 't', 'closed');
INSERT INTO public.session_labels VALUES ('ses-f5b3f06684d4edcded40', 't', 'pending');
INSERT INTO public.session_labels VALUES ('ses-1c10f06ec95419b7e7fa', 't', 'ask');

INSERT INTO public.sessions VALUES ('ses-2d032d4989b5070341ca', 'operator', 'shell', 'local', '{"profile":"default","idle_timeout":1800.0,"max_lifetime":28800.0,"idle_grace":60.0,"writable":["/tmp/hf-postgresql/state/holdfast/workspaces/operator"],"sandbox_mode":"bubblewrap","network":"none","resources":{"memory_bytes":4294967296,"processes":1024,"output_bytes":1073741824},"approval_timeout":300.0,"activity":["input","output"],"lifetime_warning":300.0}', 1794983775.407258, 1794983775.8760011, '/tmp/hf-postgresql/state/holdfast/workspaces/operator', 'CLOSED', '', '{}', '{"t":"closed"}', 80, 24, '["filesystem","network","signals","syscalls","processes","memory","wall_clock"]', '["output"]', 1794983775.9644797, 'closed by operator', 'CLOSED (closed by operator): closed; open for 0.6 s; 2 commands; 7 bytes of output; last exit code 0', '51cbf2b26982a604cd00ee7ad72b3622', 4611686018427387904, 2, NULL, 'replica-2f2ed679ed45', 1794983790.412574, 1);
INSERT INTO public.sessions VALUES ('ses-f5b3f06684d4edcded40', 'operator', 'shell', 'local', '{"profile":"default","idle_timeout":1800.0,"max_lifetime":28800.0,"idle_grace":60.0,"writable":["/tmp/hf-postgresql/state/holdfast/workspaces/operator"],"sandbox_mode":"bubblewrap","network":"none","resources":{"memory_bytes":4294967296,"processes":1024,"output_bytes":1073741824},"approval_timeout":300.0,"activity":["input","output"],"lifetime_warning":300.0}', 1794983775.6156073, 1794983775.6156073, '/tmp/hf-postgresql/state/holdfast/workspaces/operator', 'RUNNING', '', '{}', '{"t":"pending"}', 80, 24, '["filesystem","network","signals","syscalls","processes","memory","wall_clock"]', '["output"]', NULL, '', '', 'cbe82f67812ba4fe534d3440ea107a27', 0, 0, NULL, 'replica-2f2ed679ed45', 1794983793.109738, 1);
INSERT INTO public.sessions VALUES ('ses-dd4dcb497f20e461cbf8', 'operator', 'terminal', 'local', '{"profile":"default","idle_timeout":1800.0,"max_lifetime":28800.0,"idle_grace":60.0,"writable":["/tmp/hf-postgresql/state/holdfast/workspaces/operator"],"sandbox_mode":"bubblewrap","network":"none","resources":{"memory_bytes":4294967296,"processes":1024,"output_bytes":1073741824},"approval_timeout":300.0,"activity":["input","output"],"lifetime_warning":300.0}', 1794983773.6268651, 1794983776.2473748, '/tmp/hf-postgresql/state/holdfast/workspaces/operator', 'RUNNING', '', '{}', '{"t":"loop"}', 80, 24, '["filesystem","network","signals","syscalls","processes","memory","wall_clock"]', '["output"]', NULL, '', '', 'c4ce5d1e4eb2df1384b8257691c30b4d', 87, 0, NULL, 'replica-2f2ed679ed45', 1794983793.109775, 1);
INSERT INTO public.sessions VALUES ('ses-ab671a21430ce67e1713', 'operator', 'shell', 'local', '{"profile":"default","idle_timeout":1800.0,"max_lifetime":28800.0,"idle_grace":60.0,"writable":["/tmp/hf-postgresql/state/holdfast/workspaces/operator"],"sandbox_mode":"bubblewrap","network":"none","resources":{"memory_bytes":4294967296,"processes":1024,"output_bytes":1073741824},"approval_timeout":300.0,"activity":["input","output"],"lifetime_warning":300.0}', 1794983775.2714455, 1794983775.7774508, '/tmp/hf-postgresql/state/holdfast/workspaces/operator', 'RUNNING', '', '{}', '{"t":"shell"}', 80, 24, '["filesystem","network","signals","syscalls","processes","memory","wall_clock"]', '["output"]', NULL, '', '', '456f2092b5782ad3eec73c014c8c59ab', 3, 1, NULL, 'replica-2f2ed679ed45', 1794983793.110084, 1);
INSERT INTO public.sessions VALUES ('ses-1c10f06ec95419b7e7fa', 'operator', 'terminal', 'local', '{"profile":"default","idle_timeout":1800.0,"max_lifetime":28800.0,"idle_grace":60.0,"writable":["/tmp/hf-postgresql/state/holdfast/workspaces/operator"],"sandbox_mode":"bubblewrap","network":"none","resources":{"memory_bytes":4294967296,"processes":1024,"output_bytes":1073741824},"approval_timeout":300.0,"activity":["input","output"],"lifetime_warning":300.0}', 1794983775.9978342, 1794983776.2024577, '/tmp/hf-postgresql/state/holdfast/workspaces/operator', 'RUNNING', '', '{}', '{"t":"ask"}', 80, 24, '["filesystem","network","signals","syscalls","processes","memory","wall_clock"]', '["output"]', NULL, '', '', '9159529533eb5e009dbbaba3743f64f6', 64, 0, NULL, 'replica-2f2ed679ed45', 1794983793.110098, 1);

ALTER TABLE ONLY public.agents
    ADD CONSTRAINT agents_pkey PRIMARY KEY (agent_id);

ALTER TABLE ONLY public.agents
    ADD CONSTRAINT agents_token_hash_key UNIQUE (token_hash);

ALTER TABLE ONLY public.approvals
    ADD CONSTRAINT approvals_pkey PRIMARY KEY (approval_id);

ALTER TABLE ONLY public.audit_rows
    ADD CONSTRAINT audit_rows_pkey PRIMARY KEY (session_id, seq);

ALTER TABLE ONLY public.audit_streams
    ADD CONSTRAINT audit_streams_pkey PRIMARY KEY (session_id);

ALTER TABLE ONLY public.facts
    ADD CONSTRAINT facts_pkey PRIMARY KEY (name);

ALTER TABLE ONLY public.holdfast_versions
    ADD CONSTRAINT holdfast_versions_pkey PRIMARY KEY (version);

ALTER TABLE ONLY public.session_labels
    ADD CONSTRAINT session_labels_pkey PRIMARY KEY (session_id, name);

ALTER TABLE ONLY public.sessions
    ADD CONSTRAINT sessions_pkey PRIMARY KEY (session_id);

CREATE INDEX approvals_by_session ON public.approvals USING btree (session_id);

CREATE INDEX approvals_open ON public.approvals USING btree (expires_at) WHERE (outcome = ''::text);

CREATE INDEX audit_rows_by_agent ON public.audit_rows USING btree (agent_id, at, session_id, seq);

CREATE INDEX audit_rows_by_command ON public.audit_rows USING btree (command_id) WHERE (command_id <> ''::text);

CREATE INDEX audit_rows_by_time ON public.audit_rows USING btree (at, session_id, seq);

CREATE INDEX audit_streams_by_opening ON public.audit_streams USING btree (opened_seq);

CREATE INDEX session_labels_by_value ON public.session_labels USING btree (name, value);

CREATE INDEX sessions_by_age ON public.sessions USING btree (created_at, session_id);

CREATE INDEX sessions_by_close ON public.sessions USING btree (closed_at) WHERE (closed_at IS NOT NULL);

CREATE UNIQUE INDEX sessions_by_request ON public.sessions USING btree (agent_id, request_id) WHERE (request_id <> ''::text);

CREATE INDEX sessions_open ON public.sessions USING btree (agent_id) WHERE (state <> ALL (ARRAY['CLOSED'::text, 'ERROR'::text]));

ALTER TABLE ONLY public.session_labels
    ADD CONSTRAINT session_labels_session_id_fkey FOREIGN KEY (session_id) REFERENCES public.sessions(session_id) ON DELETE CASCADE;

