#!/bin/sh
# A plugin of the test cluster's network, behind `bridge`: before a pod starts, it cuts one off that the policy
# holdfast-no-network selects. CNI gives the container by variables, and the result of the plugin before on stdin.
# KUBECTL and its configuration are in `kubectl.sh` beside this file.
. "$(dirname "$0")/kubectl.sh"
input=$(cat)
name=$(echo "$CNI_ARGS" | tr ';' '\n' | sed -n 's/^K8S_POD_NAME=//p')
space=$(echo "$CNI_ARGS" | tr ';' '\n' | sed -n 's/^K8S_POD_NAMESPACE=//p')
chain=HF-$(echo "$CNI_CONTAINERID" | cut -c1-20)
case $CNI_COMMAND in
ADD)
  address=$(echo "$input" | python3 -c 'import json,sys
print(json.load(sys.stdin)["prevResult"]["ips"][0]["address"].split("/")[0])')
  kind=$(kubectl get pod -n "$space" "$name" \
    -o 'jsonpath={.metadata.labels.holdfast\.dev/network}')
  policy=$(kubectl get networkpolicy -n "$space" holdfast-no-network -o name 2>/dev/null)
  if [ "$kind" = none ] && [ -n "$policy" ]; then
    iptables -w -N $chain && iptables -w -A $chain -j DROP
    for list in INPUT FORWARD; do iptables -w -A $list -s "$address" -j $chain; done
    iptables -w -A FORWARD -d "$address" -j $chain
  fi
  echo "$input" | python3 -c 'import json,sys
print(json.dumps(json.load(sys.stdin)["prevResult"]))'
  ;;
DEL)
  iptables-save 2>/dev/null | sed -n "s/^-A \(.* -j $chain\)$/-D \1/p" | while read -r rule; do iptables -w $rule; done
  iptables -w -F $chain 2>/dev/null; iptables -w -X $chain 2>/dev/null
  ;;
VERSION) echo '{"cniVersion":"0.4.0","supportedVersions":["0.3.1","0.4.0"]}' ;;
esac
exit 0
