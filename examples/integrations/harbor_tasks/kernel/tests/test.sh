#!/bin/sh
if [ "$(cat /workspace/kernel.txt)" = "$(uname -s)" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
